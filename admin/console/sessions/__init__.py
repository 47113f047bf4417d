"""Who is signed in: sessions in the database, their cookies, content and rights, and the throttle of wrong keys."""
