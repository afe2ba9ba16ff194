// A test is a function with a name; CHECK reports and counts, main runs all and prints the tally.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace vram::testing {

struct Case {
  const char* name;
  void (*run)();
};
inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}
inline int failures = 0;

// Sanitized builds are several times slower; what is exhaustive elsewhere is sampled there, one in so many.
#if defined(__SANITIZE_THREAD__)
inline constexpr int kSlowdown = 20;
#elif defined(__SANITIZE_ADDRESS__)
inline constexpr int kSlowdown = 4;
#else
inline constexpr int kSlowdown = 1;
#endif

// Programs that try every case try one in so many: all of them with VRAM_THOROUGH set (`make test-all`).
inline std::uint64_t sampling() {
  if (kSlowdown > 1) return kSlowdown;
  return std::getenv("VRAM_THOROUGH") != nullptr ? 1 : 4;
}

struct Register {
  Register(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

inline int run_all() {
  int failed_cases = 0;
  for (const Case& test : cases()) {
    const int before = failures;
    test.run();
    const bool ok = failures == before;
    failed_cases += ok ? 0 : 1;
    std::printf("%s %s\n", ok ? "ok  " : "FAIL", test.name);
    std::fflush(stdout);
  }
  std::printf("%zu passed, %d failed\n", cases().size() - static_cast<std::size_t>(failed_cases),
              failed_cases);
  return failed_cases == 0 ? 0 : 1;
}

// Forks, and has the child end with exit code 0 if `body` returns true. The status that waitpid gives.
template <class Body>
int status_of_child(Body body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  int status = -1;
  (void)waitpid(child, &status, 0);
  return status;
}
template <class Body>
bool holds_in_child(Body body) {
  const int status = status_of_child(body);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace vram::testing

#define TEST(name)                                                     \
  static void name();                                                  \
  static const ::vram::testing::Register register_##name{#name, name}; \
  static void name()

#define CHECK(condition)                                                               \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      std::printf("%s:%d: CHECK(%s) does not hold\n", __FILE__, __LINE__, #condition); \
      ++::vram::testing::failures;                                                     \
    }                                                                                  \
  } while (0)
#define REQUIRE(condition)                                                               \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::printf("%s:%d: REQUIRE(%s) does not hold\n", __FILE__, __LINE__, #condition); \
      ++::vram::testing::failures;                                                       \
      return;                                                                            \
    }                                                                                    \
  } while (0)
#define TEST_MAIN() \
  int main() { return ::vram::testing::run_all(); }
