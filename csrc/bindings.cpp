// gsync._C: what Python sees of the C++ side. Each part adds its own names.
#include "bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "gsync's compiled part.";
  gsync::bind_errors(module);
  gsync::bind_ops(module);
  gsync::bind_engine(module);
  gsync::bind_ddp_hook(module);
  gsync::bind_grad_reducer(module);
}
