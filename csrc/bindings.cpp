// gsync._C: what Python sees of the C++ side. Each part adds its own names.
#include <pybind11/pybind11.h>

#include "ops_binding.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "gsync's compiled part.";
  gsync::bind_ops(module);
}
