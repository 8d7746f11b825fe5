class CollectiveTransport:
    def __init__(self, mesh):
        raise NotImplementedError
