// Replay through a policy. See replay.hpp.
#include "replay/replay.hpp"

#include <chrono>
#include <utility>

namespace vram {

namespace {

constexpr std::size_t kRowsBetweenPolls = 1024;

}  // namespace

bool Replayer::run(const ReplayProgram& program, const std::function<void()>& poll) {
  const auto start = std::chrono::steady_clock::now();
  std::size_t trims = 0;
  std::size_t steps = 0;
  for (std::size_t row = 0; row < program.rows && !result_.failure; ++row) {
    if (poll && row % kRowsBetweenPolls == 0) poll();
    for (; trims < program.trims && program.trim[trims] <= program.event[row]; ++trims) policy_->trim();
    for (; steps < program.steps && program.step[steps] <= program.event[row]; ++steps) policy_->step();
    if (!waiting_.empty()) complete_until(program.event[row]);
    if (step(program, row)) {
      ++result_.rows;
      continue;
    }
    const PolicyUsage usage = policy_->usage();
    result_.failure = ReplayFailure{result_.rows, program.size[row], usage.allocated, usage.reserved};
  }
  result_.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return !result_.failure;
}

bool Replayer::step(const ReplayProgram& program, std::size_t row) {
  const std::uint32_t id = program.id[row];
  if (id >= tokens_.size()) tokens_.resize(std::max<std::size_t>(id + std::size_t{1}, 2 * tokens_.size()));
  const std::int64_t time = program.time_us[row];
  if (program.op[row] == 0) {
    tokens_[id] = policy_->allocate(program.size[row], program.stream[row], time);
    return tokens_[id] != nullptr;
  }
  const Token token = std::exchange(tokens_[id], nullptr);
  if (token == nullptr) return true;
  if (program.completed[row] < 0)
    policy_->free(token, time);
  else
    waiting_.push({program.completed[row], policy_->free_later(token, program.stream[row], time)});
  return true;
}

void Replayer::complete_until(std::int64_t event) {
  while (!waiting_.empty() && waiting_.top().event <= event) {
    policy_->complete(waiting_.top().ticket);
    waiting_.pop();
  }
}

std::vector<Token> Replayer::tokens(const std::vector<std::uint32_t>& ids) const {
  std::vector<Token> found;
  for (const std::uint32_t id : ids)
    if (id < tokens_.size() && tokens_[id] != nullptr) found.push_back(tokens_[id]);
  return found;
}

ReplayResult Replayer::result() const {
  ReplayResult result = result_;
  result.usage = policy_->usage();
  return result;
}

}  // namespace vram
