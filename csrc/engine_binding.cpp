#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "engine.h"
#include "transport_c10d.h"
#include "transport_hierarchical.h"
#include "transport_nccl.h"

namespace gsync {
namespace {

std::chrono::milliseconds to_milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000.0));
}

// A process group has one backend for each type of device; a backend is taken as it is. Asked through Python, since the header
// of process groups costs ten seconds.
c10::intrusive_ptr<c10d::Backend> backend_of(const py::object& group, const std::string& device) {
  if (!py::hasattr(group, "_get_backend")) return group.cast<c10::intrusive_ptr<c10d::Backend>>();
  return group.attr("_get_backend")(py::module_::import("torch").attr("device")(device))
      .cast<c10::intrusive_ptr<c10d::Backend>>();
}

// The engine's threads may be about to take Python's lock, for a callback of a future, when the last reference goes.
void delete_engine(Engine* engine) {
  if (engine->forked()) return;  // nobody is there to end its threads: left to the end of the process
  if (Py_IsInitialized() && PyGILState_Check()) {
    const py::gil_scoped_release no_gil;
    delete engine;
  } else {
    delete engine;
  }
}

std::shared_ptr<Engine> make_engine(std::shared_ptr<Transport> transport, const std::string& device, int world_size, int rank,
                                    const std::string& exchange, double scale, int64_t slice_bytes, double timeout_s,
                                    std::optional<int> stream_priority, const std::string& label, const std::string& rounding,
                                    int64_t start_step, int64_t measure_every) {
  TORCH_CHECK_VALUE(rounding == "nearest" || rounding == "stochastic", "Engine: rounding must be nearest or stochastic, got ",
                    rounding);
  EngineOptions options;
  options.device = c10::Device(device);
  options.world_size = world_size;
  options.rank = rank;
  options.exchange = exchange;
  options.scale = scale;
  options.slice_bytes = slice_bytes;
  options.timeout = to_milliseconds(timeout_s);
  options.stream_priority = stream_priority;
  options.label = label;
  options.stochastic = rounding == "stochastic";
  options.start_step = start_step;
  options.measure_every = measure_every;
  return {new Engine(std::move(transport), std::move(options)), &delete_engine};
}

// The engines to close before the interpreter goes, so that no thread is left to touch what is being taken down.
class LiveEngines {
 public:
  void add(const std::shared_ptr<Engine>& engine) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(engines_, [](const std::weak_ptr<Engine>& weak) { return weak.expired(); });
    engines_.push_back(engine);
  }
  void close() {
    std::vector<std::weak_ptr<Engine>> engines;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      engines.swap(engines_);
    }
    for (const auto& weak : engines) {
      if (const auto engine = weak.lock()) engine->close();
    }
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Engine>> engines_;
};

using OptionalPair = std::optional<std::pair<at::Tensor, at::Tensor>>;

void set_parameters(Engine& engine, std::vector<at::Tensor> parameters, std::vector<std::string> names,
                    std::vector<std::string> codecs, std::vector<int64_t> block_sizes, const std::vector<OptionalPair>& residuals,
                    std::vector<std::string> exchanges) {
  ParameterTable table{std::move(parameters), std::move(names), std::move(codecs), std::move(block_sizes), {},
                       std::move(exchanges)};
  for (const OptionalPair& pair : residuals) {
    table.residuals.push_back(pair ? std::optional(Residual{pair->first, pair->second}) : std::nullopt);
  }
  engine.set_parameters(table);
}

// The last reference may go in any thread, and after the interpreter.
void delete_callback(py::function* callback) {
  if (!Py_IsInitialized()) return;
  const py::gil_scoped_acquire gil;
  delete callback;
}

void call_at(Engine& engine, int64_t step, py::function callback) {
  const std::shared_ptr<py::function> kept(new py::function(std::move(callback)), &delete_callback);
  engine.call_at(step, [kept] {
    const py::gil_scoped_acquire gil;
    try {
      (*kept)();
    } catch (const py::error_already_set& error) {
      throw std::runtime_error(error.what());  // in a form that needs no lock to go
    }
  });
}

std::shared_ptr<Transport> transport_of(const Engine& engine, const std::string& level) {
  if (level == "all") return engine.transport();
  const auto levels = std::dynamic_pointer_cast<HierarchicalTransport>(engine.transport());
  TORCH_CHECK_VALUE(levels && (level == "inner" || level == "outer"), "Engine.transport: there is no level ", level);
  return level == "inner" ? levels->inner() : levels->outer();
}

void add_times(py::dict& result, const PhaseTimes& ms) {
  result["pack_ms"] = ms[static_cast<size_t>(Phase::kPack)];
  result["exchange_ms"] = ms[static_cast<size_t>(Phase::kExchange)];
  result["unpack_ms"] = ms[static_cast<size_t>(Phase::kUnpack)];
  result["bucket_ms"] = ms[static_cast<size_t>(Phase::kBucket)];
}

// As gsync/spans.py has them: (phase, step, bucket, slice, begin, end), times in s; and the number that found no room.
std::pair<py::list, int64_t> take_trace(Engine& engine) {
  Trace trace;
  {
    const py::gil_scoped_release no_gil;
    trace = engine.take_trace();
  }
  constexpr std::array<const char*, kNumPhases> kNames{"pack", "exchange", "unpack", "exposed", "bucket", "step"};
  py::list spans;
  for (const TraceSpan& span : trace.spans) {
    spans.append(py::make_tuple(kNames[static_cast<size_t>(span.phase)], span.of.step, span.of.bucket, span.of.slice,
                                1e-9 * static_cast<double>(span.begin_ns), 1e-9 * static_cast<double>(span.end_ns)));
  }
  return {spans, trace.dropped};
}

py::dict stats_of(Engine& engine) {
  warn_if_fp16_vanishes(engine);
  EngineStats stats;
  {
    // It may wait for the device, and for a bucket that is being handed over.
    const py::gil_scoped_release no_gil;
    stats = engine.stats();
  }
  py::dict result;
  result["steps"] = stats.steps;
  result["buckets"] = stats.buckets;
  result["gradient_bytes"] = stats.gradient_bytes;
  result["wire_bytes"] = stats.wire_bytes;
  add_times(result, stats.clock.ms);
  result["exposed_ms"] = stats.clock.ms[static_cast<size_t>(Phase::kExposed)];
  result["waiting_ms"] = stats.clock.waiting_ms;
  result["queued"] = stats.clock.queued;
  result["max_queue_depth"] = stats.clock.max_queued;
  py::list buckets;
  for (size_t i = 0; i < stats.by_bucket.size(); ++i) {
    const BucketTotals& totals = stats.by_bucket[i];
    py::dict bucket;
    bucket["bucket"] = i;
    bucket["times"] = totals.times;
    bucket["gradient_bytes"] = totals.gradient_bytes;
    bucket["wire_bytes"] = totals.wire_bytes;
    add_times(bucket, i < stats.clock.buckets.size() ? stats.clock.buckets[i] : PhaseTimes{});
    buckets.append(bucket);
  }
  result["per_bucket"] = buckets;
  result["nonfinite_steps"] = stats.nonfinite_steps;
  result["packed_nonzero"] = stats.packed_nonzero;
  result["packed_vanished"] = stats.packed_vanished;
  result["buffer_bytes"] = stats.buffer_bytes;
  result["error_sums"] = stats.error_sums;
  return result;
}

}  // namespace

void warn_if_fp16_vanishes(Engine& engine) {
  if (!engine.take_fp16_warning()) return;
  const EngineStats stats = engine.stats();
  const std::string message = "gsync: " + std::to_string(stats.packed_vanished) + " of " + std::to_string(stats.packed_nonzero) +
                              " non-zero gradient values became zero in fp16, whose smallest value is 6e-8; codec='bf16' keeps "
                              "them, at 8 instead of 11 bits of precision";
  const py::object category = py::module_::import("gsync.errors").attr("GsyncWarning");
  if (PyErr_WarnEx(category.ptr(), message.c_str(), 2) != 0) throw py::error_already_set();
}

void bind_engine(py::module_& module) {
  using no_gil = py::call_guard<py::gil_scoped_release>;

  py::class_<Collective, std::shared_ptr<Collective>>(module, "Collective", "One collective under way.")
      .def("wait", &Collective::finish, no_gil(), "Waits for its end; on a device the current stream does.");

  py::class_<Transport, std::shared_ptr<Transport>>(module, "Transport", "Who moves bytes between the ranks.")
      .def_property_readonly("name", &Transport::name)
      .def("all_reduce", &Transport::all_reduce, py::arg("payload"), no_gil())
      .def("all_to_all", &Transport::all_to_all, py::arg("out"), py::arg("payload"), no_gil())
      .def("all_gather", &Transport::all_gather, py::arg("out"), py::arg("payload"), no_gil())
      .def("abort", &Transport::abort, no_gil(), "Ends the communicators, so that the other ranks fail at once.");

  py::class_<C10dTransport, Transport, std::shared_ptr<C10dTransport>>(module, "C10dTransport", "Transport over process groups.")
      .def(
          py::init([](const py::object& main, const py::object& gather, int rank, int size, double timeout_s,
                      const std::string& device, bool owned, std::vector<int> known_as) {
            return std::make_shared<C10dTransport>(backend_of(main, device), backend_of(gather, device), rank, size,
                                                   to_milliseconds(timeout_s), owned, std::move(known_as));
          }),
          py::arg("main"), py::arg("gather"), py::arg("rank"), py::arg("size"), py::arg("timeout_s"), py::arg("device") = "cpu",
          py::arg("owned") = true, py::arg("known_as") = std::vector<int>{},
          "Takes two groups (or Backends) of the same ranks over: main for all_reduce and all_to_all, gather for all_gather.\n\n"
          "owned=True: nobody else may hold a reference to them, since Gloo tells the other ranks of a failure only by destroying\n"
          "the group. owned=False: the groups belong to the user and are never aborted.");

  py::class_<NcclTransport, Transport, std::shared_ptr<NcclTransport>>(module, "NcclTransport",
                                                                       "Transport over a NCCL communicator of its own.")
      .def(py::init([](c10::intrusive_ptr<c10d::Store> store, int rank, int size, const std::string& device, double timeout_s,
                       std::optional<int> min_ctas, std::optional<int> max_ctas, const std::string& library) {
             const py::gil_scoped_release gil_released;
             return std::make_shared<NcclTransport>(std::move(store), rank, size, c10::Device(device), to_milliseconds(timeout_s),
                                                    min_ctas.value_or(nccl::kUndefined), max_ctas.value_or(nccl::kUndefined),
                                                    library);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("device"), py::arg("timeout_s"),
           py::arg("min_ctas") = py::none(), py::arg("max_ctas") = py::none(), py::arg("library") = "libnccl.so.2",
           "Collective: every rank makes one, with a store that nobody else uses.")
      .def("split", &NcclTransport::split, py::arg("color"), py::arg("key"), py::arg("size"), no_gil(),
           "Returns a transport over the ranks that call with the same color, in the order of key. Collective.");

  py::class_<HierarchicalTransport, Transport, std::shared_ptr<HierarchicalTransport>>(
      module, "HierarchicalTransport", "Transports over all ranks, those of a host, and those of equal local rank, as one.")
      .def(py::init([](std::shared_ptr<Transport> all, std::shared_ptr<Transport> inner, std::shared_ptr<Transport> outer,
                       int local_rank, int ranks_per_host, int host, int num_hosts) {
             return std::make_shared<HierarchicalTransport>(std::move(all), std::move(inner), std::move(outer),
                                                            HostPlace{local_rank, ranks_per_host, host, num_hosts});
           }),
           py::arg("all"), py::arg("inner"), py::arg("outer"), py::arg("local_rank"), py::arg("ranks_per_host"), py::arg("host"),
           py::arg("num_hosts"));

  module.def("cost_of_clock", &cost_of_clock, py::arg("num_buckets"), no_gil(),
             "Returns what it costs to take the times of so many buckets, in s.");

  const auto live = std::make_shared<LiveEngines>();
  py::module_::import("atexit").attr("register")(py::cpp_function([live] { live->close(); }, no_gil()));

  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine", "Owns stream, order, buffers, transport and watchdog.")
      .def(py::init([live](std::shared_ptr<Transport> transport, const std::string& device, int world_size, int rank,
                           const std::string& exchange, double scale, int64_t slice_bytes, double timeout_s,
                           std::optional<int> stream_priority, const std::string& label, const std::string& rounding,
                           int64_t start_step, int64_t measure_every) {
             auto engine = make_engine(std::move(transport), device, world_size, rank, exchange, scale, slice_bytes, timeout_s,
                                       stream_priority, label, rounding, start_step, measure_every);
             live->add(engine);
             return engine;
           }),
           py::arg("transport").none(true), py::arg("device"), py::arg("world_size"), py::arg("rank"), py::arg("exchange"),
           py::arg("scale"), py::arg("slice_bytes"), py::arg("timeout_s"), py::arg("stream_priority") = py::none(),
           py::arg("label") = "", py::arg("rounding") = "nearest", py::arg("start_step") = 0, py::arg("measure_every") = 0)
      .def("set_parameters", &set_parameters, py::arg("params"), py::arg("names"), py::arg("codecs"),
           py::arg("block_sizes") = std::vector<int64_t>{}, py::arg("residuals") = std::vector<OptionalPair>{},
           py::arg("exchanges") = std::vector<std::string>{}, no_gil())
      .def("call_at", &call_at, py::arg("step"), py::arg("callback"))
      .def("time_steps", &Engine::time_steps, no_gil())
      .def("take_step_times",
           [](Engine& self) {
             StepTimes times;
             {
               const py::gil_scoped_release gil_released;
               times = self.take_step_times();
             }
             return py::make_tuple(times.ms, times.ready_ms);
           })
      .def("last_buckets", &Engine::last_buckets, no_gil())
      .def("transport", &transport_of, py::arg("level") = "all")
      .def("follow_loss_scale", &Engine::follow_loss_scale, py::arg("scale"), py::arg("unit"), no_gil())
      .def("stats", &stats_of)
      .def("reset_stats", &Engine::reset_stats, no_gil())
      .def("start_trace", &Engine::start_trace, py::arg("capacity"), no_gil())
      .def("take_trace", &take_trace)
      .def("sum_of_squares", &Engine::sum_of_squares, no_gil())
      .def("found_nonfinite", &Engine::found_nonfinite, no_gil())
      .def("raise_pending",
           [](Engine& self) {
             warn_if_fp16_vanishes(self);
             self.raise_pending();
           })
      .def("abort", &Engine::abort, py::arg("reason"), no_gil())
      .def("close", &Engine::close, no_gil())
      .def_property_readonly("failed", &Engine::failed)
      .def_property_readonly("closed", &Engine::closed)
      .def_property_readonly("step", &Engine::step)
      .def("set_step", &Engine::set_step, py::arg("step"))
      .def("set_seed", &Engine::set_seed, py::arg("seed"));
}

}  // namespace gsync
