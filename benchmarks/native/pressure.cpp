// What requests cost near a limit, on a model device: how many move pages, how many pages they move, the
// driver's calls and its time, for many kinds of program. PyTorch's allocator, as a policy on the same
// prices, is beside it. An argument selects the programs whose name contains it; `--work` leaves work queued
// on the stream, so that addresses in use by it cannot be mapped again.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "backends/model.hpp"
#include "pool/pool.hpp"
#include "replay/policies/torch.hpp"

namespace {

using namespace vram;

// One request: the blocks that are freed before it, its name, its size, and those that are freed behind it.
struct Step {
  std::vector<std::uint32_t> victims;
  std::uint64_t size = 0;
  std::vector<std::uint32_t> after;
};
struct Program {
  std::string name;
  std::uint64_t limit = 0;
  std::vector<Step> before;  // not measured
  std::vector<Step> steps;
};

using Random = std::mt19937_64;
using Size = std::function<std::uint64_t(Random&)>;

std::uint64_t rounded(double size) { return static_cast<std::uint64_t>(size) / 512 * 512; }

Size between(double least, double most) {
  return [=](Random& random) {
    return rounded(least *
                   std::exp2(std::uniform_real_distribution<double>(0, std::log2(most / least))(random)));
  };
}
Size one_of(Size often, Size seldom, double share) {
  return [=](Random& random) {
    return std::uniform_real_distribution<double>(0, 1)(random) < share ? seldom(random) : often(random);
  };
}
Size among(std::vector<std::uint64_t> sizes) {
  return [=](Random& random) { return sizes[random() % sizes.size()]; };
}

// Keeps what is live while a program is written.
struct Writer {
  Random random;
  std::vector<std::uint64_t> sizes;
  std::vector<std::uint32_t> live;
  std::uint64_t held = 0;

  std::uint32_t add(std::uint64_t size) {
    sizes.push_back(size);
    live.push_back(static_cast<std::uint32_t>(sizes.size() - 1));
    held += size;
    return live.back();
  }
  std::uint32_t remove(std::size_t at) {
    const std::uint32_t name = live[at];
    held -= sizes[name];
    live.erase(live.begin() + static_cast<std::ptrdiff_t>(at));
    return name;
  }
};

// Mixed sizes fill a share of the limit, every other block is freed, then each request frees random blocks,
// or the oldest ones, until it fits.
Program churn(std::string name, std::uint64_t limit, double share, const Size& size, std::uint64_t seed,
              bool oldest = false, int requests = 1000) {
  Program program{std::move(name), limit, {}, {}};
  Writer writer{Random(seed), {}, {}, 0};
  const auto most = static_cast<std::uint64_t>(static_cast<double>(limit) * share);
  for (std::uint64_t next = size(writer.random); writer.held + next <= most; next = size(writer.random)) {
    writer.add(next);
    program.before.push_back({{}, next, {}});
  }
  std::vector<std::uint32_t> thinned;
  for (std::size_t i = 0; i < writer.live.size(); ++i) thinned.push_back(writer.remove(i));
  program.before.back().after = thinned;
  for (int i = 0; i < requests; ++i) {
    Step step{{}, size(writer.random), {}};
    while (writer.held + step.size > most)
      step.victims.push_back(writer.remove(oldest ? 0 : writer.random() % writer.live.size()));
    writer.add(step.size);
    program.steps.push_back(std::move(step));
  }
  return program;
}

// Sequences of an LLM server: each has a cache that is replaced by a larger one when it is full, until the
// sequence ends; a new one begins where there is room.
Program serving(std::string name, std::uint64_t limit, double share, std::uint64_t seed, double growth) {
  Program program{std::move(name), limit, {}, {}};
  Writer writer{Random(seed), {}, {}, 0};
  const auto most = static_cast<std::uint64_t>(static_cast<double>(limit) * share);
  const Size first = between(4 * kMiB, 32 * kMiB);
  while (program.steps.size() < 1500) {
    Step step;
    const bool fresh = writer.live.empty() || writer.random() % 4 == 0;
    std::uint32_t grown = 0;
    if (fresh) {
      step.size = first(writer.random);
    } else {
      grown = writer.live[writer.random() % writer.live.size()];
      step.size = rounded(static_cast<double>(writer.sizes[grown]) * growth);
      if (step.size > 400 * kMiB) {
        step.size = first(writer.random);
        grown = ~0u;
      }
    }
    while (writer.held + step.size > most) {
      const std::size_t at = writer.random() % writer.live.size();
      if (!fresh && writer.live[at] == grown) continue;
      step.victims.push_back(writer.remove(at));
    }
    writer.add(step.size);
    if (!fresh && grown != ~0u) {
      const auto at = std::find(writer.live.begin(), writer.live.end(), grown);
      step.after.push_back(writer.remove(static_cast<std::size_t>(at - writer.live.begin())));
    }
    program.steps.push_back(std::move(step));
  }
  return program;
}

// Training steps of varying length near the limit: activations forward, freed in reverse, with temporaries.
Program training(std::string name, std::uint64_t limit, std::uint64_t seed) {
  Program program{std::move(name), limit, {}, {}};
  Writer writer{Random(seed), {}, {}, 0};
  for (int i = 0; i < 48; ++i) {
    const std::uint64_t size = rounded(static_cast<double>(limit) / 48 * 0.35);
    writer.add(size);
    program.before.push_back({{}, size, {}});
  }
  const std::uint64_t fixed = writer.held;
  for (int step = 0; step < 24; ++step) {
    const double length = std::uniform_real_distribution<double>(0.5, 1.0)(writer.random);
    std::vector<std::uint32_t> kept;
    const double room = (static_cast<double>(limit) * 0.95 - static_cast<double>(fixed)) * length;
    std::vector<std::uint32_t> victims;
    for (int layer = 0; layer < 16; ++layer)
      for (const double part : {0.25, 0.125, 0.5, 0.03, 0.06}) {
        const std::uint64_t size = rounded(room / 17 * part);
        const std::uint32_t at = writer.add(size);
        program.steps.push_back({victims, size, {}});
        victims.clear();
        if (part == 0.06) {
          victims.push_back(at);
        } else {
          kept.push_back(at);
        }
      }
    std::reverse(kept.begin(), kept.end());
    victims.insert(victims.end(), kept.begin(), kept.end());
    program.steps.push_back({victims, 512, {}});
    program.steps.back().after = {writer.add(512)};
  }
  return program;
}

std::vector<Program> programs() {
  std::vector<Program> all;
  const std::uint64_t limit = 8 * kGiB;
  const auto scaled = [](std::uint64_t of) {
    return between(static_cast<double>(of) / 4096, static_cast<double>(of) / 32);
  };
  for (int seed = 0; seed < 3; ++seed)
    all.push_back(churn("mixed 95 % seed " + std::to_string(seed), limit, 0.95, scaled(limit), seed));
  for (const int share : {50, 85, 90, 98, 99})
    all.push_back(churn("mixed " + std::to_string(share) + " %", limit, share / 100.0, scaled(limit), 7));
  for (const std::uint64_t gib : {1, 2, 4, 32, 80, 128})
    all.push_back(
        churn("mixed 95 % of " + std::to_string(gib) + " GiB", gib * kGiB, 0.95, scaled(gib * kGiB), 11));
  all.push_back(churn("2..256 MiB of 64 GiB", 64 * kGiB, 0.95, scaled(limit), 12, false, 3000));
  all.push_back(churn("oldest freed", limit, 0.95, scaled(limit), 13, true));
  all.push_back(churn("small 64 KiB..8 MiB", limit, 0.95, between(64 * kKiB, 8 * kMiB), 14, false, 6000));
  all.push_back(churn("middle 1..16 MiB", limit, 0.95, between(kMiB, 16 * kMiB), 15, false, 3000));
  all.push_back(churn("large 64..512 MiB", limit, 0.95, between(64 * kMiB, 512 * kMiB), 16));
  all.push_back(churn("huge 0.3..1.5 GiB", limit, 0.95, between(300 * kMiB, 1536 * kMiB), 17));
  all.push_back(churn("large among small", limit, 0.95,
                      one_of(between(128 * kKiB, 4 * kMiB), between(128 * kMiB, 512 * kMiB), 0.02), 18, false,
                      6000));
  all.push_back(churn("half large, half small", limit, 0.95,
                      one_of(between(512 * kKiB, 4 * kMiB), between(64 * kMiB, 256 * kMiB), 0.5), 19));
  all.push_back(churn("a few sizes", limit, 0.95,
                      among({3 * kMiB, 10 * kMiB, 24 * kMiB, 48 * kMiB, 96 * kMiB, 100 * kMiB}), 20));
  all.push_back(churn("powers of two", limit, 0.97,
                      among({2 * kMiB, 4 * kMiB, 8 * kMiB, 16 * kMiB, 32 * kMiB, 64 * kMiB, 128 * kMiB}),
                      21));
  all.push_back(serving("serving, doubling", limit, 0.95, 22, 2.0));
  all.push_back(serving("serving, +25 %", limit, 0.95, 23, 1.25));
  all.push_back(serving("serving, +25 %, 88 %", limit, 0.88, 24, 1.25));
  all.push_back(training("training, varying steps", limit, 25));
  all.push_back(training("training, 40 GiB", 40 * kGiB, 26));
  return all;
}

// ---- running ----------------------------------------------------------------------------------------------

struct Found {
  std::uint64_t refused = 0;
  std::uint64_t refused_filling = 0;
  double us = 0;
  double peak_reserved = 0;
  std::uint64_t moving = 0;  // requests that called the driver for memory
  std::uint64_t creates = 0, releases = 0, maps = 0, unmaps = 0, accesses = 0;
};

// Frees the oldest block and tries again where a request is refused.
template <typename Allocate, typename Free>
std::uint64_t play(const std::vector<Step>& steps, std::map<std::uint32_t, std::uint64_t>& live,
                   std::uint32_t& name, bool filling, Allocate allocate, Free release) {
  std::uint64_t refused = 0;
  const auto drop = [&](std::uint32_t each) {
    const auto at = live.find(each);
    if (at == live.end()) return;
    release(at->second);
    live.erase(at);
  };
  for (const Step& step : steps) {
    for (const std::uint32_t each : step.victims) drop(each);
    std::uint64_t token = 0;
    while (!allocate(step.size, &token)) {
      ++refused;
      if (filling || live.empty()) break;
      drop(live.begin()->first);
    }
    if (token != 0) live[name] = token;
    ++name;
    for (const std::uint32_t each : step.after) drop(each);
  }
  return refused;
}

Found with_vram(const Program& program, bool work) {
  ModelOptions options;
  options.lag_us = work ? 2000 : 0;
  const auto device = std::make_shared<ModelBackend>(256 * kGiB, options);
  PoolConfig config;
  config.limit = program.limit;
  Pool pool(device, config);
  Found found;
  double now = 0;
  const auto allocate = [&](std::uint64_t size, std::uint64_t* token) {
    now += 200;
    if (work) device->set_time(now);
    const std::uint64_t before = device->memory_calls();
    const bool served = pool.allocate(size, 0, 0, 0, token).ok();
    found.moving += device->memory_calls() != before;
    if (work && served) (void)device->work(0, 1, *token, size);
    return served;
  };
  const auto release = [&](std::uint64_t token) { (void)pool.free(token); };
  std::map<std::uint32_t, std::uint64_t> live;
  std::uint32_t name = 0;
  found.refused_filling = play(program.before, live, name, true, allocate, release);
  const char* const calls[] = {"page_create", "page_release", "map", "unmap", "set_access"};
  std::uint64_t* const counts[] = {&found.creates, &found.releases, &found.maps, &found.unmaps,
                                   &found.accesses};
  for (int i = 0; i < 5; ++i) *counts[i] -= device->calls(calls[i]);
  found.us = -device->driver_us();
  found.moving = 0;
  found.refused = play(program.steps, live, name, false, allocate, release);
  for (int i = 0; i < 5; ++i) *counts[i] += device->calls(calls[i]);
  found.us += device->driver_us();
  found.peak_reserved = static_cast<double>(pool.stats().reserved.peak);
  std::string why;
  if (!pool.check(&why)) std::printf("check: %s\n", why.c_str());
  return found;
}

Found with_torch(const Program& program) {
  TorchConfig config;
  config.allowed = program.limit;
  TorchPolicy torch(config, PolicyDevice(PolicyDevice::kUnlimited));
  Found found;
  const auto allocate = [&](std::uint64_t size, std::uint64_t* token) {
    const std::uint64_t before = torch.usage().driver_calls;
    *token = reinterpret_cast<std::uint64_t>(torch.allocate(size, 0, 0));
    found.moving += torch.usage().driver_calls != before;
    return *token != 0;
  };
  const auto release = [&](std::uint64_t token) { torch.free(reinterpret_cast<Token>(token), 0); };
  std::map<std::uint32_t, std::uint64_t> live;
  std::uint32_t name = 0;
  found.refused_filling = play(program.before, live, name, true, allocate, release);
  found.us = -torch.usage().driver_us;
  found.moving = 0;
  found.refused = play(program.steps, live, name, false, allocate, release);
  found.us += torch.usage().driver_us;
  return found;
}

}  // namespace

int main(int count, char** arguments) {
  bool work = false, torch = true;
  const char* only = "";
  for (int i = 1; i < count; ++i) {
    if (std::strcmp(arguments[i], "--work") == 0) {
      work = true;
    } else if (std::strcmp(arguments[i], "--no-torch") == 0) {
      torch = false;
    } else {
      only = arguments[i];
    }
  }
  std::printf("%-26s %8s %8s %7s %7s %7s %7s %7s %8s | %8s %8s\n", "per request", "refused", "moving", "maps",
              "unmaps", "access", "creates", "release", "us", "t.refus", "torch us");
  double ours = 0, theirs = 0;
  for (const Program& program : programs()) {
    if (program.name.find(only) == std::string::npos) continue;
    const Found vram = with_vram(program, work);
    const Found peer = torch ? with_torch(program) : Found{};
    const auto each = static_cast<double>(program.steps.size());
    std::printf("%-26s %4lu+%-3lu %7.1f%% %7.3f %7.3f %7.3f %7.3f %7.3f %8.1f | %4lu+%-3lu %8.1f\n",
                program.name.c_str(), vram.refused, vram.refused_filling,
                100 * static_cast<double>(vram.moving) / each, static_cast<double>(vram.maps) / each,
                static_cast<double>(vram.unmaps) / each, static_cast<double>(vram.accesses) / each,
                static_cast<double>(vram.creates) / each, static_cast<double>(vram.releases) / each,
                vram.us / each, peer.refused, peer.refused_filling, peer.us / each);
    ours += std::log(std::max(vram.us / each, 0.1));
    theirs += std::log(std::max(peer.us / each, 0.1));
  }
  const auto all = static_cast<double>(programs().size());
  std::printf("geometric mean %.1f us, torch %.1f us\n", std::exp(ours / all), std::exp(theirs / all));
  return 0;
}
