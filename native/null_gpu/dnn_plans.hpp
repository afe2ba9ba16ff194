// `Plans`: which convolution a plan of cuDNN is for. The library's descriptors cannot be asked, so what is
// set on them is followed: tensors and convolution → operation → graph → heuristics or engine → configuration
// → plan.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <variant>
#include <vector>

#include "null_gpu/rules.hpp"

namespace vram::null_gpu {

using Descriptor = void*;

class Plans {
 public:
  static Plans& get();

  void created(Descriptor descriptor, int kind);
  void destroyed(Descriptor descriptor);
  int kind_of(Descriptor descriptor);  // -1: not known
  void was_set(Descriptor descriptor, int attribute, std::int64_t count, const void* values);
  // Heuristics have answered with configurations.
  void found(Descriptor heuristics, std::int64_t count, const Descriptor* configurations);
  struct Planned {
    Convolution convolution;
    bool first;  // of what the heuristics offered
  };
  // The convolution that a plan computes; none: it computes something else, or more.
  std::optional<Planned> convolution_of(Descriptor plan);

 private:
  using Numbers = std::vector<std::int64_t>;
  struct Known {
    int kind = -1;
    std::map<int, Numbers> numbers;       // of tensors and convolutions, by attribute
    std::optional<Convolution> computes;  // of operations and everything made of them
    bool first = false;                   // of configurations and plans
  };
  void set_operation(Known& operation, int attribute, const Known& part);

  std::mutex mutex_;
  std::unordered_map<Descriptor, Known> known_;
};

}  // namespace vram::null_gpu
