NCCLTrainerSendWeightsArgs = NCCLWeightTransferEngine = None
