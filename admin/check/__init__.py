"""`loramux check`: would this base model or this adapter be served?"""
