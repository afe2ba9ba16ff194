// Replay for Python: a policy's settings and columns in, one dict out. The loop is in
// native/replay/replay.cpp.
#include "replay/replay.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "column.hpp"
#include "interrupts.hpp"
#include "python_types.hpp"
#include "replay/policies/bfc.hpp"
#include "replay/policies/cuda_async.hpp"
#include "replay/policies/rmm_arena.hpp"
#include "replay/policies/rmm_pool.hpp"
#include "replay/policies/torch_expandable.hpp"
#include "replay/policies/vram.hpp"

namespace nb = nanobind;

namespace vram {

namespace {

constexpr std::uint64_t kRealPoolUnlimited = 4 * 1024 * kGiB;  // the pool serves requests of up to 1 TiB
constexpr std::uint32_t kMostStreams = 1 << 20;

// ---- settings: parsed and checked by Python ----------------------------------------------------------

template <typename Value>
void read(const nb::dict& conf, const char* name, Value* value) {
  if (conf.contains(name)) *value = nb::cast<Value>(conf[name]);
}

TorchConfig torch_config(const nb::dict& conf, std::uint64_t capacity) {
  TorchConfig config;
  read(conf, "max_split_size", &config.max_split_size);
  read(conf, "max_non_split_rounding", &config.max_non_split_rounding);
  read(conf, "large_segment", &config.large_segment);
  read(conf, "garbage_collection_threshold", &config.garbage_collection_threshold);
  if (conf.contains("roundup_power2_divisions")) {
    const auto divisions = nb::cast<std::vector<std::uint64_t>>(conf["roundup_power2_divisions"]);
    if (divisions.size() != TorchConfig::kIntervals) throw nb::value_error("16 divisions are needed");
    std::copy(divisions.begin(), divisions.end(), config.roundup_power2_divisions.begin());
  }
  double fraction = 1;
  read(conf, "per_process_memory_fraction", &fraction);
  if (capacity != 0) config.allowed = static_cast<std::uint64_t>(fraction * static_cast<double>(capacity));
  return config;
}

BfcConfig bfc_config(const nb::dict& conf) {
  BfcConfig config;
  read(conf, "allow_growth", &config.allow_growth);
  read(conf, "garbage_collection", &config.garbage_collection);
  return config;
}

RmmPoolConfig rmm_pool_config(const nb::dict& conf) {
  RmmPoolConfig config;
  read(conf, "initial_pool_size", &config.initial_size);
  read(conf, "maximum_pool_size", &config.maximum_size);
  return config;
}

std::vector<RecordedSegment> recorded_segments(nb::handle sizes, nb::handle addresses) {
  const Column<std::uint64_t> size(sizes, "segment_size");
  const Column<std::uint64_t> address(addresses, "segment_address");
  if (size.size() != address.size()) throw nb::value_error("columns differ in length");
  std::vector<RecordedSegment> recorded(size.size());
  for (std::size_t i = 0; i < recorded.size(); ++i) recorded[i] = {size.data()[i], address.data()[i]};
  return recorded;
}

// capacity: 0 for unlimited.
std::unique_ptr<Policy> make_policy(const std::string& name, const nb::dict& conf, std::uint64_t capacity,
                                    double lag_us, bool keep_sizes, std::vector<RecordedSegment> recorded) {
  if (name == "vram") {
    PoolConfig config;
    if (!config_from(conf.ptr(), &config)) throw nb::python_error();
    return std::make_unique<VramPolicy>(config, capacity != 0 ? capacity : kRealPoolUnlimited, lag_us);
  }
  const std::uint64_t bytes = capacity != 0 ? capacity : PolicyDevice::kUnlimited;
  PolicyDevice device(std::min(bytes, PolicyDevice::kUnlimited), keep_sizes);
  if (name == "cuda-async") return std::make_unique<CudaAsyncPolicy>(device);
  if (name == "bfc") return std::make_unique<BfcPolicy>(bfc_config(conf), device);
  if (name == "rmm-pool") return std::make_unique<RmmPoolPolicy>(rmm_pool_config(conf), device);
  if (name == "rmm-arena") return std::make_unique<RmmArenaPolicy>(device);
  PolicyDevice unlimited(PolicyDevice::kUnlimited, keep_sizes, std::move(recorded));
  if (name == "torch") return std::make_unique<TorchPolicy>(torch_config(conf, capacity), unlimited);
  if (name == "torch-expandable")
    return std::make_unique<TorchExpandablePolicy>(torch_config(conf, capacity), unlimited);
  throw nb::value_error(("unknown policy " + name).c_str());
}

// ---- the object ----------------------------------------------------------------------------------------

bool run(Replayer& replayer, nb::handle op, nb::handle id, nb::handle size, nb::handle stream,
         nb::handle time_us, nb::handle event, nb::handle completed, nb::handle emptied, nb::handle begun,
         nb::handle ask) {
  const Column<std::uint8_t> ops(op, "op");
  const Column<std::uint32_t> ids(id, "id");
  const Column<std::uint64_t> sizes(size, "size");
  const Column<std::uint32_t> streams(stream, "stream");
  const Column<std::int64_t> times(time_us, "time_us");
  const Column<std::int64_t> events(event, "event");
  const Column<std::int64_t> ends(completed, "completed");
  const Column<std::int64_t> trims(emptied, "emptied");
  const Column<std::int64_t> steps(begun, "steps");
  const std::size_t rows = ops.size();
  for (std::size_t length :
       {ids.size(), sizes.size(), streams.size(), times.size(), events.size(), ends.size()})
    if (length != rows) throw nb::value_error("columns differ in length");
  const ReplayProgram program{rows,           ops.data(),   ids.data(),    sizes.data(),
                              streams.data(), times.data(), events.data(), ends.data(),
                              trims.size(),   trims.data(), steps.size(),  steps.data()};
  // Tables are as long as the largest number: numbers must be dense.
  const std::size_t seen = replayer.result().rows + rows;
  for (std::size_t row = 0; row < rows; ++row)
    if (ids.data()[row] >= seen || streams.data()[row] >= kMostStreams)
      throw nb::value_error("an id or stream is out of range");
  const nb::gil_scoped_release release;
  return replayer.run(program, Interrupts(ask));
}

nb::dict traffic(const SpillTraffic& spill) {
  nb::dict dict;
  dict["moved_out"] = spill.moved_out;
  dict["moved_back"] = spill.moved_back;
  dict["read"] = spill.read;
  dict["swaps"] = spill.swaps;
  dict["returns"] = spill.returns;
  dict["peak"] = spill.peak;
  dict["held_us"] = spill.held_us;
  dict["read_us"] = spill.read_us;
  dict["created_us"] = spill.created_us;
  return dict;
}

nb::dict result(const Replayer& replayer) {
  const ReplayResult result = replayer.result();
  nb::dict dict;
  dict["peak_allocated"] = result.usage.peak_allocated;
  dict["peak_reserved"] = result.usage.peak_reserved;
  dict["driver_calls"] = result.usage.driver_calls;
  dict["driver_us"] = result.usage.driver_us;
  dict["retries"] = result.usage.retries;
  dict["spill"] = traffic(result.usage.spill);
  dict["seconds"] = result.seconds;
  dict["rows"] = result.rows;
  dict["oom"] = nb::none();
  if (result.failure) {
    nb::dict failure;
    failure["event"] = result.failure->row;
    failure["size"] = result.failure->size;
    failure["allocated"] = result.failure->allocated;
    failure["reserved"] = result.failure->reserved;
    dict["oom"] = failure;
  }
  return dict;
}

nb::list spill_steps(const Replayer& replayer) {
  nb::list steps;
  for (const SpillTraffic& step : replayer.policy().spill_steps()) steps.append(traffic(step));
  return steps;
}

// ---- what a framework does: policy "vram" only

VramPolicy& spilling(Replayer& replayer) {
  auto* const policy = dynamic_cast<VramPolicy*>(&replayer.policy());
  if (policy == nullptr) throw nb::value_error("only the policy vram spills");
  return *policy;
}

using Look = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>;

Look look(Replayer& replayer, bool restart_peak) {
  const VramPolicy::Look look = spilling(replayer).look(restart_peak);
  return {look.usage.live, look.usage.peak_live, look.usage.spilled, look.needed};
}

std::uint64_t bring_back(Replayer& replayer, std::uint64_t most, std::int64_t time_us) {
  VramPolicy& policy = spilling(replayer);
  const nb::gil_scoped_release release;
  return policy.bring_back(most, time_us);
}

void steer(Replayer& replayer, const std::vector<std::uint32_t>& first,
           const std::vector<std::uint32_t>& last) {
  spilling(replayer).steer(replayer.tokens(first), replayer.tokens(last));
}

std::string broken(const Replayer& replayer) {
  std::string why;
  return replayer.policy().check(&why) ? "" : why;
}

}  // namespace

void bind_replay(nb::module_& module) {
  nb::class_<Replayer>(module, "Replayer", "Replays a recorded program through a policy.")
      .def(
          "__init__",
          [](Replayer* self, const std::string& policy, const nb::dict& conf, std::uint64_t capacity,
             double lag_us, nb::handle segment_size, nb::handle segment_address, bool keep_sizes) {
            new (self) Replayer(make_policy(policy, conf, capacity, lag_us, keep_sizes,
                                            recorded_segments(segment_size, segment_address)));
          },
          nb::arg("policy"), nb::arg("conf"), nb::arg("capacity"), nb::arg("lag_us"), nb::arg("segment_size"),
          nb::arg("segment_address"), nb::arg("keep_sizes") = false)
      .def("run", run, nb::arg("op"), nb::arg("id"), nb::arg("size"), nb::arg("stream"), nb::arg("time_us"),
           nb::arg("event"), nb::arg("completed"), nb::arg("emptied"), nb::arg("steps"),
           nb::arg("ask") = nb::none(),
           "Run the rows; return whether memory was enough. `ask` is called every 50 ms and can end the "
           "replay "
           "by raising, like Ctrl-C.")
      .def("result", result)
      .def("segment_sizes", [](const Replayer& self) { return self.policy().segment_sizes(); })
      .def("spill_steps", spill_steps, "What spilling had done when each step began, and at the end.")
      .def(
          "look", look, nb::arg("restart_peak") = false,
          "Return live, peak and spilled bytes, and how many were lacking since the last look when pages had "
          "to move. The peak is that since the last look that restarted it.")
      .def("bring_back", bring_back, nb::arg("most"), nb::arg("time_us"),
           "Move at most so many bytes back to the device while enough of it is free; return how many.")
      .def(
          "take_host_bytes",
          [](Replayer& it, std::uint64_t bytes) { return spilling(it).take_host_bytes(bytes); },
          nb::arg("bytes"), "Take host memory for copies of tensors. Return whether there was so much.")
      .def(
          "give_host_bytes", [](Replayer& it, std::uint64_t bytes) { spilling(it).give_host_bytes(bytes); },
          nb::arg("bytes"), "Return it.")
      .def("steer", steer, nb::arg("first"), nb::arg("last"),
           "Ids of allocations that go to the host first, or last. Replaces what was said before.")
      .def("broken", broken, "Return the first violated invariant of the policy, or an empty string.");
}

}  // namespace vram
