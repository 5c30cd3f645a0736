#include "errors.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <cctype>
#include <string>
#include <utility>

namespace gsync {
namespace {

// The names of the classes in gsync.errors. RuntimeError stands in when the package is half gone, at interpreter exit.
constexpr const char* kSyncError = "SyncError";
constexpr const char* kSyncTimeoutError = "SyncTimeoutError";
constexpr const char* kInternalError = "InternalError";

class GsyncError final : public torch::PyTorchError {
 public:
  GsyncError(const char* class_name, std::string message) : torch::PyTorchError(std::move(message)), class_name_(class_name) {}

  // Called with the GIL held. The class is a borrowed reference that gsync.errors keeps alive.
  PyObject* python_type() override {
    PyObject* module = PyImport_ImportModule("gsync.errors");
    PyObject* type = module != nullptr ? PyObject_GetAttrString(module, class_name_) : nullptr;
    Py_XDECREF(module);
    if (type == nullptr) {
      PyErr_Clear();
      return PyExc_RuntimeError;
    }
    Py_DECREF(type);
    return type;
  }

 private:
  const char* class_name_;
};

bool names_a_timeout(const std::string& cause) {
  for (const char* words : {"imed out", "imeout", "ime-out"}) {
    if (cause.find(words) != std::string::npos) return true;
  }
  return false;
}

// A message of Gloo begins with a place in its source, "[../pair.cc:547] ", and ends with general advice; kept is what happened. The
// twin of as_sync_error in gsync/groups.py.
std::string without_advice(std::string message) {
  const size_t place_end = message.find("] ");
  if (message.empty() || message.front() != '[' || place_end == std::string::npos ||
      message.rfind(':', place_end) == std::string::npos)
    return message;
  message.erase(0, place_end + 2);
  message.erase(std::min(message.find('\n'), message.size()));
  for (size_t end = message.find(". "); end != std::string::npos; end = message.find(". ", end + 1)) {
    if (end + 2 < message.size() && std::isupper(static_cast<unsigned char>(message[end + 2])) != 0) {
      message.erase(end);
      break;
    }
  }
  return message;
}

}  // namespace

std::exception_ptr make_sync_error(const ErrorPlace& place, const std::string& cause) {
  std::string message = "gsync: ";
  if (place.bucket >= 0) {
    message += "bucket " + std::to_string(place.bucket) + " of step ";
  } else {
    message += "step ";
  }
  message += std::to_string(place.step) + " on rank " + std::to_string(place.rank) + " of " + std::to_string(place.world_size);
  if (!place.label.empty()) message += " (" + place.label + ")";
  message += " was not synchronised: " + cause +
             ". The gradients concerned are filled with NaN; call reset() before the next backward, on every rank.";
  return std::make_exception_ptr(GsyncError(names_a_timeout(cause) ? kSyncTimeoutError : kSyncError, std::move(message)));
}

void throw_internal_error(const std::string& message) {
  throw GsyncError(kInternalError, "gsync: " + message + " (please report this)");
}

std::string cause_of(const std::exception_ptr& error) noexcept {
  if (!error) return "unknown error";
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    return without_advice(e.what_without_backtrace());
  } catch (const std::exception& e) {
    return without_advice(e.what());
  } catch (...) {
    return "unknown error";
  }
}

void bind_errors(pybind11::module_& /*module*/) {
  // For functions of this module; torch's own know torch::PyTorchError already.
  pybind11::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (GsyncError& e) {
      PyErr_SetString(e.python_type(), e.what());
    }
  });
}

}  // namespace gsync
