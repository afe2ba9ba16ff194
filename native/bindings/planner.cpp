// The planner for Python: columns in, one dict out. native/planner/planner.cpp does the planning.
#include "planner/planner.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bindings.hpp"
#include "column.hpp"
#include "interrupts.hpp"

namespace nb = nanobind;

namespace vram {

namespace {

nb::dict plan_columns(nb::handle lower, nb::handle upper, nb::handle size, std::uint64_t align,
                      std::uint64_t capacity, double time_limit, std::uint64_t seed) {
  const Column<std::int64_t> lowers(lower, "lower"), uppers(upper, "upper");
  const Column<std::uint64_t> sizes(size, "size");
  if (lowers.size() != uppers.size() || lowers.size() != sizes.size())
    throw nb::value_error("columns differ in length");
  if (align == 0) throw nb::value_error("the alignment must not be 0");
  std::vector<PlanBuffer> buffers(lowers.size());
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    buffers[i] = {lowers.data()[i], uppers.data()[i], sizes.data()[i]};
    if (buffers[i].lower >= buffers[i].upper) throw nb::value_error("a buffer must end after it begins");
  }
  PlanResult result;
  {
    const nb::gil_scoped_release release;
    result = plan(buffers, {align, capacity, time_limit, seed, Interrupts()});
  }
  nb::dict dict;
  dict["offsets"] = nb::bytes(result.offsets.data(), result.offsets.size() * sizeof(std::uint64_t));
  dict["peak"] = result.peak;
  dict["lower_bound"] = result.lower_bound;
  dict["method"] = result.method;
  dict["proven"] = result.proven;
  dict["seconds"] = result.seconds;
  return dict;
}

}  // namespace

void bind_planner(nb::module_& module) {
  module.def("plan", plan_columns, nb::arg("lower"), nb::arg("upper"), nb::arg("size"), nb::arg("align"),
             nb::arg("capacity"), nb::arg("time_limit"), nb::arg("seed"),
             "Return offsets for buffers with known lifetimes.");
}

}  // namespace vram
