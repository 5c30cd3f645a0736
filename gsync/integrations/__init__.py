"""Where `sync.stats()` goes while training runs: TensorBoard, a text file for Prometheus. Each by its own library, an extra."""
