"""What gsync is to other libraries. Where `sync.stats()` goes: TensorBoard, Prometheus. Who trains: Lightning, Accelerate,
transformers. Each by its own library, an extra."""
