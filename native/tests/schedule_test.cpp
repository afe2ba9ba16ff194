// Every schedule, not some: all sequences of up to six operations over three streams, and all interleavings
// of programs of fixed operations on two and three streams, on a model device that does nothing unless
// stepped. The oracle judges each, and afterwards every stream asks for memory, so that whatever went free is
// handed on.
#include <array>
#include <cstdlib>

#include "oracle.hpp"
#include "testing.hpp"

using namespace vram;
using vram::testing::manual;
using vram::testing::Watched;

namespace {

constexpr int kStreams = 3;

enum class Act : std::uint8_t {
  allocate,  // a block for the stream, which has at most one
  use,       // work of the stream on its own block
  borrow,    // work of the stream on the next stream's block, with record_stream
  release,   // the stream's block is freed
  step,      // the device executes one operation of the stream
};
constexpr int kActs = 5;
const char* const kNames[kActs] = {"allocate", "use", "borrow", "release", "step"};

struct Operation {
  Act act;
  int stream;
};

struct Setting {
  PoolConfig config;
  std::uint64_t size;
  std::uint64_t capacity;
};

// One pool for many sequences: each begins with it empty.
class Stage {
 public:
  explicit Stage(const Setting& setting)
      : setting_(setting), world_(setting.capacity, setting.config, manual()) {
    for (StreamHandle& stream : streams_) (void)world_.device->stream_create(&stream);
  }

  // What makes sense is up to the program; an operation without its block does nothing.
  void act(const Operation& operation) {
    const StreamHandle stream = streams_[static_cast<std::size_t>(operation.stream)];
    const int own = block_of(stream);
    switch (operation.act) {
      case Act::allocate:
        if (own < 0) allocate(stream);
        break;
      case Act::use:
        if (own >= 0) world_.use(static_cast<std::size_t>(own));
        break;
      case Act::borrow: {
        const int other = block_of(streams_[static_cast<std::size_t>((operation.stream + 1) % kStreams)]);
        if (other >= 0) expect(world_.use_on(static_cast<std::size_t>(other), stream), "record_stream");
        break;
      }
      case Act::release:
        if (own >= 0) expect(world_.free(static_cast<std::size_t>(own)), "free");
        break;
      case Act::step:
        world_.device->step(stream);
        break;
    }
  }

  // Every stream asks for memory; then all is given back. True when every promise was kept.
  bool finish(std::string* why) {
    for (const StreamHandle stream : streams_)
      if (block_of(stream) < 0) allocate(stream);
    // The pool checks itself on its slow paths; its accounts are looked at now and then.
    if (++finished_ % 16 == 0) (void)world_.good(why);
    while (!world_.held.empty()) expect(world_.free(world_.held.size() - 1), "free");
    expect(world_.pool->trim(0, true), "trim");
    const ModelCounts left = world_.device->counts();
    if (left.page_bytes + left.plain_bytes != 0) world_.oracle->faults.push_back("memory is lost");
    if (why->empty() && !world_.oracle->faults.empty()) *why = world_.oracle->faults.front();
    return why->empty();
  }

 private:
  int block_of(StreamHandle stream) const {
    for (std::size_t i = 0; i < world_.held.size(); ++i)
      if (world_.held[i].stream == stream) return static_cast<int>(i);
    return -1;
  }
  void allocate(StreamHandle stream) {
    const Status status = world_.allocate(setting_.size, stream);
    if (status.code != Code::out_of_memory) expect(status, "allocate");
  }
  void expect(const Status& status, const char* what) {
    if (!status.ok()) world_.oracle->faults.push_back(std::string(what) + " fails in " + status.call);
  }

  Setting setting_;
  Watched world_;
  std::array<StreamHandle, kStreams> streams_{};
  std::uint64_t finished_ = 0;
};

// Memory for two blocks, so that three streams cannot but share: small ones on one page, large ones that
// move by pages, and the same without pages.
std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const bool pages : {true, false})
    for (const CrossStream cross : {CrossStream::ready, CrossStream::wait})
      for (const bool small : {true, false}) {
        PoolConfig config;
        config.pages = pages;
        config.cross_stream = cross;
        all.push_back({config, small ? 900 * kKiB : 2 * kMiB, small ? 2 * kMiB : 4 * kMiB});
      }
  return all;
}

void tell(const std::vector<Operation>& sequence, const std::string& why) {
  std::printf("%s:", why.c_str());
  for (const Operation& operation : sequence)
    std::printf(" %s(%d)", kNames[static_cast<int>(operation.act)], operation.stream);
  std::printf("\n");
  ++vram::testing::failures;
}

bool perform(Stage& stage, const std::vector<Operation>& sequence) {
  for (const Operation& operation : sequence) stage.act(operation);
  std::string why;
  if (stage.finish(&why)) return true;
  tell(sequence, why);
  return false;
}

// ---- all sequences
// ------------------------------------------------------------------------------------------

// Which blocks there are after a prefix, and how much is queued at most; enough to leave out what does
// nothing.
struct Outline {
  std::array<bool, kStreams> live{};
  std::array<int, kStreams> queued{};
  bool makes_sense(const Operation& operation) const {
    const auto s = static_cast<std::size_t>(operation.stream);
    switch (operation.act) {
      case Act::allocate:
        return !live[s];
      case Act::borrow:
        return live[(s + 1) % kStreams];
      case Act::step:
        return queued[s] > 0;
      default:
        return live[s];
    }
  }
  Outline after(const Operation& operation) const {
    Outline next = *this;
    const auto s = static_cast<std::size_t>(operation.stream);
    if (operation.act == Act::allocate) next.live[s] = true;
    if (operation.act == Act::release) next.live[s] = false;
    // A free or an allocation may have the pool queue fences and waits anywhere.
    if (operation.act == Act::step) --next.queued[s];
    if (operation.act == Act::use) ++next.queued[s];
    if (operation.act == Act::borrow) next.queued[s] += 2, ++next.queued[(s + 1) % kStreams];
    if (operation.act == Act::release)
      for (int& queued_here : next.queued) queued_here += 1;
    return next;
  }
};

bool every_sequence(Stage& stage, std::size_t length, const Outline& outline,
                    std::vector<Operation>& sequence, std::uint64_t* count) {
  if (sequence.size() == length) {
    ++*count;
    return perform(stage, sequence);
  }
  for (int kind = 0; kind < kActs; ++kind)
    for (int stream = 0; stream < kStreams; ++stream) {
      const Operation operation{static_cast<Act>(kind), stream};
      if (!outline.makes_sense(operation)) continue;
      sequence.push_back(operation);
      const bool good = every_sequence(stage, length, outline.after(operation), sequence, count);
      sequence.pop_back();
      if (!good) return false;
    }
  return true;
}

// ---- all interleavings
// ----------------------------------------------------------------------------------------

using Program = std::vector<Act>;

bool every_interleaving(Stage& stage, const Program& program, std::array<std::size_t, kStreams> at,
                        int streams, std::vector<Operation>& sequence, std::uint64_t* count) {
  bool ended = true;
  for (int stream = 0; stream < streams; ++stream) {
    auto& position = at[static_cast<std::size_t>(stream)];
    if (position == program.size()) continue;
    ended = false;
    sequence.push_back({program[position++], stream});
    const bool good = every_interleaving(stage, program, at, streams, sequence, count);
    sequence.pop_back();
    --position;
    if (!good) return false;
  }
  if (!ended) return true;
  ++*count;
  return perform(stage, sequence);
}

}  // namespace

TEST(every_sequence_of_up_to_six_operations_on_three_streams) {
  const char* const wanted = std::getenv("VRAM_SCHEDULE_LENGTH");
  const std::size_t usual = vram::testing::kSlowdown > 1 ? 4 : vram::testing::sampling() > 1 ? 5 : 6;
  const std::size_t length = wanted != nullptr ? std::strtoul(wanted, nullptr, 10) : usual;
  std::uint64_t count = 0;
  for (const Setting& setting : settings()) {
    Stage stage(setting);
    std::vector<Operation> sequence;
    if (!every_sequence(stage, length, {}, sequence, &count)) return;
  }
  std::printf("     %llu sequences\n", static_cast<unsigned long long>(count));
}

TEST(every_interleaving_of_two_programs_of_six_operations) {
  const std::vector<Program> programs = {
      {Act::allocate, Act::use, Act::release, Act::allocate, Act::step, Act::release},
      {Act::allocate, Act::use, Act::borrow, Act::release, Act::step, Act::allocate},
      {Act::allocate, Act::borrow, Act::release, Act::step, Act::step, Act::allocate},
  };
  std::uint64_t count = 0;
  for (const Setting& setting : settings())
    for (const Program& program : programs) {
      Stage stage(setting);
      std::vector<Operation> sequence;
      if (!every_interleaving(stage, program, {}, 2, sequence, &count)) return;
    }
  std::printf("     %llu interleavings\n", static_cast<unsigned long long>(count));
}

TEST_MAIN()
