// What an allocate+free pair costs from C++: the six scenarios of native/bench/bench.hpp on the host device.
// `vram bench hotpath` has the same beside Python and the peers. `--json` prints one object for machines.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "backends/host.hpp"
#include "bench/bench.hpp"

namespace {

using namespace vram;

constexpr int kRepeats = 15;  // the least counts: the others were disturbed

double run(Pool& pool, bench::Scenario scenario) {
  double ns = 0;
  if (bench::run_pairs(pool, scenario, &ns).ok()) return ns;
  std::fprintf(stderr, "out of memory\n");
  std::exit(1);
}

double ns_per_pair(bench::Scenario scenario) {
  Pool pool(std::make_shared<HostBackend>(8 * kGiB), PoolConfig{});
  double least = run(pool, scenario);  // fills the cache
  for (int i = 0; i < kRepeats; ++i) least = std::min(least, run(pool, scenario));
  return least;
}

}  // namespace

int main(int count, char** arguments) {
  const bool json = count > 1 && std::strcmp(arguments[1], "--json") == 0;
  std::printf(json ? "{" : "%-20s %10s\n", "scenario", "ns a pair");
  for (int i = 0; i < bench::kScenarios; ++i) {
    const auto scenario = static_cast<bench::Scenario>(i);
    std::printf(json ? "%s\"%s\": %.1f" : "%s%-20s %10.1f\n", json && i > 0 ? ", " : "",
                bench::name_of(scenario), ns_per_pair(scenario));
  }
  if (json) std::printf("}\n");
  return 0;
}
