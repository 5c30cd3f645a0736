#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "grad_reducer.h"

namespace gsync {
namespace {

// Calls Python, under its lock. An error crosses the autograd engine as torch's own, with its type.
template <typename... Arguments>
void call(const py::object& callback, Arguments&&... arguments) {
  const py::gil_scoped_acquire gil;
  try {
    callback(std::forward<Arguments>(arguments)...);
  } catch (py::error_already_set& error) {
    error.restore();
    python_error torch_error;
    torch_error.persist();
    throw torch_error;
  }
}

class PythonOwner final : public ReducerOwner {
 public:
  /// Args: sending, synchronised: may be None
  PythonOwner(py::object prepare, py::object learned, py::object sending, py::object synchronised)
      : prepare_(std::move(prepare)), learned_(std::move(learned)) {
    if (!sending.is_none()) sending_ = std::move(sending);
    if (!synchronised.is_none()) synchronised_ = std::move(synchronised);
  }
  ~PythonOwner() override {
    const py::gil_scoped_acquire gil;
    prepare_ = py::object();
    learned_ = py::object();
    sending_ = py::object();
    synchronised_ = py::object();
  }
  PythonOwner(const PythonOwner&) = delete;
  PythonOwner& operator=(const PythonOwner&) = delete;

  void prepare() override { call(prepare_); }
  void learned(const std::vector<int64_t>& order, const std::vector<int64_t>& repeated) override {
    call(learned_, order, repeated);
  }
  void sending(int64_t bucket) override {
    if (sending_) call(sending_, bucket);
  }
  void synchronised() override {
    if (synchronised_) call(synchronised_);
  }

 private:
  py::object prepare_;
  py::object learned_;
  py::object sending_;
  py::object synchronised_;
};

using BucketTuple = std::tuple<std::vector<int64_t>, bool, bool>;

}  // namespace

void bind_grad_reducer(py::module_& module) {
  using no_gil = py::call_guard<py::gil_scoped_release>;

  py::class_<GradReducer, std::shared_ptr<GradReducer>>(module, "GradReducer",
                                                        "Hooks on gradient accumulators that hand buckets to an engine.")
      .def(py::init([](std::vector<at::Tensor> params, std::vector<std::string> names, py::object prepare, py::object learned,
                       py::object sending, py::object synchronised) {
             auto owner = std::make_unique<PythonOwner>(std::move(prepare), std::move(learned), std::move(sending),
                                                        std::move(synchronised));
             auto reducer = std::make_shared<GradReducer>(std::move(params), std::move(names), std::move(owner));
             reducer->install();
             return reducer;
           }),
           py::arg("params"), py::arg("names"), py::arg("prepare"), py::arg("learned"), py::arg("sending") = py::none(),
           py::arg("synchronised") = py::none())
      .def("set_engine", &GradReducer::set_engine, py::arg("engine").none(true), no_gil())
      .def(
          "set_buckets",
          [](GradReducer& self, const std::vector<BucketTuple>& buckets, bool learning) {
            std::vector<ReducerBucket> converted;
            for (const auto& [parameters, is_sparse, is_late] : buckets) converted.push_back({parameters, is_sparse, is_late});
            self.set_buckets(std::move(converted), learning);
          },
          py::arg("buckets"), py::arg("learning"), no_gil())
      .def_property("enabled", &GradReducer::enabled, &GradReducer::set_enabled)
      .def("note_backward", &GradReducer::note_backward, no_gil())
      .def("check", &GradReducer::check, no_gil())
      .def("unsynchronised", &GradReducer::unsynchronised)
      .def("unhooked", &GradReducer::unhooked)
      .def("wait", &GradReducer::wait, no_gil())
      .def("close", &GradReducer::close, no_gil());
}

}  // namespace gsync
