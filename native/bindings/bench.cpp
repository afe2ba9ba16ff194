// The native benchmarks for Python: one run per call, without the GIL. native/bench/bench.cpp has the loops.
#include "bench/bench.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "bindings.hpp"
#include "errors.hpp"
#include "python_types.hpp"

namespace nb = nanobind;

namespace vram {

namespace {

PyObject* pool_core = nullptr;  // vram._native.PoolCore

Pool& pool_of(nb::handle object) {
  if (!PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(pool_core)))
    throw nb::type_error("a benchmark needs a vram.Pool");
  Pool* pool = reinterpret_cast<PyPool*>(object.ptr())->quick;
  if (pool == nullptr || pool->closed()) throw nb::value_error("the pool is closed, or a driver pool");
  return *pool;
}

bench::Scenario scenario_of(const std::string& name) {
  for (int i = 0; i < bench::kScenarios; ++i)
    if (const auto scenario = static_cast<bench::Scenario>(i); name == bench::name_of(scenario))
      return scenario;
  throw nb::value_error(("unknown scenario " + name).c_str());
}

template <typename Call>
void measured(Call call) {
  Status status;
  {
    const nb::gil_scoped_release released;
    status = call();
  }
  require_ok(status, "run a benchmark");
}

double bench_pairs(nb::handle object, const std::string& name) {
  Pool& pool = pool_of(object);
  const bench::Scenario scenario = scenario_of(name);
  double ns = 0;
  measured([&] { return bench::run_pairs(pool, scenario, &ns); });
  return ns;
}

double bench_driver_pairs(const CudaBackend& cuda, const std::string& name) {
  const bench::Scenario scenario = scenario_of(name);
  double ns = 0;
  measured([&] { return bench::run_driver_pairs(cuda, scenario, &ns); });
  return ns;
}

std::tuple<double, double, double> bench_threads(const std::vector<nb::object>& objects,
                                                 const std::vector<StreamHandle>& streams, bool hand_over,
                                                 std::size_t batches) {
  std::vector<Pool*> pools;
  for (const nb::object& object : objects) pools.push_back(&pool_of(object));
  if (pools.empty() || streams.empty() || batches == 0)
    throw nb::value_error("bench_threads needs at least one pool, one stream and one batch");
  if (hand_over && pools.size() > 1) throw nb::value_error("hand_over needs a single pool");
  bench::ThreadsCost cost;
  measured([&] { return bench::run_threads(pools, streams, hand_over, batches, &cost); });
  return {cost.wall_ns, cost.cpu_ns, cost.handed_over};
}

std::vector<std::tuple<std::uint32_t, std::uint64_t>> bench_swaps() {
  std::vector<std::tuple<std::uint32_t, std::uint64_t>> list;
  for (const bench::Swap& swap : bench::swaps()) list.emplace_back(swap.slot, swap.bytes);
  return list;
}

template <std::size_t Count>
std::vector<std::uint64_t> listed(const std::uint64_t (&values)[Count]) {
  return {values, values + Count};
}

}  // namespace

void bind_bench(nb::module_& module) {
  using namespace nb::literals;
  pool_core = nb::object(module.attr("PoolCore")).release().ptr();
  module.def("bench_pairs", &bench_pairs, "pool"_a, "scenario"_a,
             "Run a scenario in C++ on the default stream and return nanoseconds per pair.");
  module.def("bench_driver_pairs", &bench_driver_pairs, "backend"_a, "scenario"_a,
             "The same with cuMemAllocFromPoolAsync and cuMemFreeAsync, from a separate driver pool.");
  module.def("bench_threads", &bench_threads, "pools"_a, "streams"_a, "hand_over"_a, "batches"_a,
             "Run one thread per stream, on one pool or one pool each. Return wall and processor nanoseconds "
             "per pair, and the share of blocks freed by another thread.");
  module.def(
      "bench_layer",
      [] { return std::tuple(listed(bench::kKept), listed(bench::kTemporary), bench::kLayers); },
      "A layer of the transformer step: sizes kept until the backward pass, temporary sizes, layers.");
  module.def("bench_swaps", &bench_swaps,
             "The scenario with variable sizes: (slot, bytes) of each replacement.");
}

}  // namespace vram
