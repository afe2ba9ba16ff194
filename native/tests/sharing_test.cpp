// Allocations that one process shares and another maps, on model devices: which pages arrive, in which order,
// and what happens when either process goes wrong or ends.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "plug/engine_parts.hpp"
#include "plug/plug.hpp"
#include "sharing/attachments.hpp"
#include "sharing/server.hpp"
#include "testing.hpp"
#include "world.hpp"

using namespace vram;
using vram::testing::holds_in_child;
using vram::testing::World;

namespace {

void* pointer(Address address) { return reinterpret_cast<void*>(address); }
Address number(void* address) { return reinterpret_cast<Address>(address); }

// A pool on a model device that serves device 0 in this process. It is kept forever, like every such pool.
struct Plugged : World {
  explicit Plugged(const PoolConfig& config = {}, std::uint64_t capacity = kGiB) : World(capacity, config) {
    Plug::set_pool(0, pool);
  }
  ~Plugged() { Plug::set_pool(0, nullptr); }
};

struct Shared {
  std::string name;
  std::int64_t offset = -1;
};
Shared share(Address address) {
  Shared shared;
  char text[1024];
  const char* why = nullptr;
  shared.name.assign(text, vram_engine_share(pointer(address), text, sizeof text, &shared.offset, &why));
  if (shared.name.empty()) CHECK(why != nullptr);
  return shared;
}
Address attach(const std::string& name, std::string* why = nullptr) {
  const char* reason = "";
  void* const at = vram_engine_attach(0, name.data(), name.size(), &reason);
  if (why != nullptr) *why = reason;
  return number(at);
}

// A request as a process sends it that has the name of the allocation.
PageRequest request_for(Address block, std::uint64_t number, std::uint64_t first = 0) {
  return {PageRequest::kMagic, 0, block, number, first, ShareServer::secrets().asking};
}
// What this process's server answers on a new connection: an error number, or 0 and pages.
int answer_to(const PageRequest& request, std::vector<SharedPage>* pages) {
  const Socket socket(connect_server(ShareServer::identity(), 10));
  PageAnswer answer;
  if (const int error = send_request(socket.fd(), request); error != 0) return error;
  return receive_answer(socket.fd(), &answer, pages);
}

// The pages under a range, by their number in the process that made them.
std::vector<PageHandle> pages_at(ModelBackend& device, Address address, std::uint64_t bytes) {
  std::vector<PageHandle> pages;
  for (Address at = address / kSlotBytes * kSlotBytes; at < address + bytes; at += kSlotBytes)
    pages.push_back(device.page_shown(at));
  return pages;
}

int open_descriptors() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) count += fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
  return count;
}

// Two pipes between this process and a child that runs `body(read_line, write_line)` before it has used
// anything.
class Child {
 public:
  template <class Body>
  explicit Child(Body body) {
    int down[2], up[2];
    if (pipe(down) != 0 || pipe(up) != 0) std::abort();
    process_ = fork();
    to_ = process_ == 0 ? up[1] : down[1];
    from_ = process_ == 0 ? down[0] : up[0];
    for (int fd : {down[0], down[1], up[0], up[1]})
      if (fd != to_ && fd != from_) ::close(fd);
    if (process_ == 0) {
      body(*this);
      _exit(0);
    }
  }
  ~Child() {
    ::close(to_);
    if (process_ > 0) (void)wait();
    ::close(from_);
  }
  void write(const std::string& line) {
    const std::string text = line + '\n';
    if (::write(to_, text.data(), text.size()) != static_cast<ssize_t>(text.size())) std::abort();
  }
  // Empty if the other end is gone.
  std::string read() {
    std::string line;
    for (char c = 0; ::read(from_, &c, 1) == 1 && c != '\n';) line += c;
    return line;
  }
  void kill() { (void)::kill(process_, SIGKILL); }
  int wait() {
    int status = -1;
    (void)waitpid(process_, &status, 0);
    process_ = 0;
    return status;
  }

 private:
  pid_t process_ = -1;
  int to_ = -1;
  int from_ = -1;
};

std::string numbers(const std::vector<PageHandle>& pages) {
  std::string text;
  for (PageHandle page : pages) text += std::to_string(page) + ",";
  return text;
}

// A process that shares allocations: it makes one of each size that it reads, answers with its name, offset
// and pages, and keeps it until it reads "free".
void produce(Child& parent) {
  Plugged world;
  Address last = 0;
  for (std::string line = parent.read(); !line.empty(); line = parent.read()) {
    if (line == "free") {
      parent.write(world.pool->free(last).ok() ? "freed" : "not freed");
      continue;
    }
    const std::uint64_t size = std::stoull(line);
    last = world.get(size);
    const Shared shared = share(last);
    parent.write(shared.name);
    parent.write(std::to_string(shared.offset));
    parent.write(numbers(pages_at(*world.device, last, size)));
  }
}

}  // namespace

// ---- between two processes ------------------------------------------------------------------------------

// First, because the child is forked before this process has used anything.
TEST(another_process_maps_the_same_pages_in_the_same_order) {
  Child producer(produce);
  Plugged world;
  for (const std::uint64_t size : {std::uint64_t{1000}, 300 * kKiB, 5 * kMiB, 70 * kMiB, 700 * kMiB}) {
    producer.write(std::to_string(size));
    const std::string name = producer.read();
    const std::uint64_t offset = std::stoull(producer.read());
    const std::string pages = producer.read();
    REQUIRE(!name.empty() && name.size() < 1024);
    const int before = open_descriptors();
    std::string why;
    const Address base = attach(name, &why);
    REQUIRE(base != 0);
    CHECK(numbers(pages_at(*world.device, base + offset, size)) == pages);
    CHECK(open_descriptors() == before);
    CHECK(world.device->work(0, 1, base + offset, size).ok());
    CHECK(world.device->counts().page_bytes == 0);  // the memory is the other process's
    vram_engine_detach(pointer(base));  // waits for the work, as the device refuses to unmap before
    CHECK(world.device->counts().mappings == 0 && world.device->counts().pages == 0 &&
          world.device->counts().spaces == 0);
    producer.write("free");
    CHECK(producer.read() == "freed");
    CHECK(attach(name, &why) == 0 && why.find("was freed") != std::string::npos);
  }
  CHECK(world.good());
}

TEST(a_producer_that_has_ended_is_named) {
  Child producer(produce);
  Plugged world;
  producer.write("1000");
  const std::string name = producer.read();
  const Address base = attach(name);
  REQUIRE(base != 0);
  producer.kill();
  (void)producer.wait();
  CHECK(attach(name) == base);  // what is attached stays
  vram_engine_detach(pointer(base));
  vram_engine_detach(pointer(base));
  std::string why;
  CHECK(attach(name, &why) == 0);
  CHECK(why.find("has ended") != std::string::npos);
  CHECK(world.device->counts().pages == 0 && world.device->counts().spaces == 0);
}

TEST(consumers_that_crash_leave_nothing_in_the_producer) {
  Plugged world;
  const Address block = world.get(100 * kMiB);
  const Shared shared = share(block);
  const int before = open_descriptors();
  for (int i = 0; i < 3; ++i) {
    const int status = vram::testing::status_of_child([&] {
      Plugged consumer;
      if (attach(shared.name) == 0) return false;
      std::abort();
    });
    CHECK(WIFSIGNALED(status));
  }
  // A half-way crash: connected, asked, gone.
  for (int i = 0; i < 100; ++i) {
    const Socket socket(connect_server(ShareServer::identity(), 10));
    REQUIRE(socket.fd() >= 0);
    CHECK(send_request(socket.fd(), request_for(block, 1)) == 0);
  }
  CHECK(holds_in_child([&] {
    Plugged consumer;
    return attach(shared.name) != 0;
  }));
  // The server closes a connection when it hears of its end, which is before it answers a later one.
  CHECK(open_descriptors() <= before + 1 + ShareServer::kConnections);
  CHECK(world.pool->free(block).ok() && world.good());
}

// ---- in one process ---------------------------------------------------------------------------------------

TEST(a_process_attaches_its_own_memory) {
  Plugged world;
  const Address block = world.get(40 * kMiB);
  const Shared shared = share(block + 12345);  // any address inside
  const Address base = attach(shared.name);
  REQUIRE(base != 0);
  CHECK(pages_at(*world.device, base, 40 * kMiB) == pages_at(*world.device, block, 40 * kMiB));
  CHECK((base + static_cast<Address>(shared.offset)) % kSlotBytes == (block + 12345) % kSlotBytes);
  CHECK(attach(shared.name) == base);
  vram_engine_detach(pointer(base));
  CHECK(world.device->page_shown(base) != 0);
  vram_engine_detach(pointer(base));
  CHECK(world.device->page_shown(base) == 0);
  vram_engine_detach(pointer(base));  // once too often
  CHECK(world.pool->free(block).ok());
  CHECK(world.good());
}

TEST(a_name_is_that_of_one_allocation) {
  Plugged world;
  const Address first = world.get(4096);
  const Address second = world.get(4096);
  const std::string name = share(first).name;
  CHECK(share(first).name == name && share(first + 100).name == name);
  CHECK(share(second).name != name);
  CHECK(world.pool->free(first).ok());
  const Address again = world.get(4096);
  CHECK(again == first);
  CHECK(share(again).name != name);
  std::string why;
  CHECK(attach(name, &why) == 0 && why.find("was freed") != std::string::npos);
  CHECK(share(1234567).name.empty());
  CHECK(world.pool->free(first).ok() && world.pool->free(second).ok());
  CHECK(share(second).name.empty());
  // What was shared once is cached again when it is an ordinary allocation.
  const Address ordinary = world.get(4096);
  CHECK(world.pool->free(ordinary).ok() && world.pool->free(world.get(4096)).ok());
  CHECK(world.good());
}

TEST(what_is_shared_is_not_suspended) {
  Plugged world;
  const Address shared = world.get(64 * kMiB);
  const Address other = world.get(64 * kMiB);
  REQUIRE(!share(shared).name.empty());
  const auto pages = pages_at(*world.device, shared, 64 * kMiB);
  std::uint64_t given = 0;
  OutOfMemoryReport report;
  REQUIRE(world.pool->suspend({}, false, nullptr, &given, &report).ok());
  CHECK(given == 64 * kMiB);
  CHECK(!world.pool->suspended(shared) && world.pool->suspended(other));
  CHECK(pages_at(*world.device, shared, 64 * kMiB) == pages);
  CHECK(share(other).name.empty());  // it has no memory now
  std::uint64_t taken = 0;
  REQUIRE(world.pool->resume({}, &taken, &report).ok());
  // Freed and allocated again, it can be suspended.
  CHECK(world.pool->free(shared).ok());
  const Address again = world.get(64 * kMiB);
  REQUIRE(world.pool->suspend({}, false, nullptr, &given, &report).ok());
  CHECK(world.pool->suspended(again));
  REQUIRE(world.pool->resume({}, &taken, &report).ok());
  CHECK(world.pool->free(again).ok() && world.pool->free(other).ok() && world.good());
}

TEST(plain_segments_have_the_drivers_name) {
  Plugged world(vram::testing::plain());
  const Address one = world.get(kMiB);
  const Address two = world.get(kMiB);
  const Shared first = share(one);
  const Shared second = share(two);
  REQUIRE(!first.name.empty() && first.name.size() < 1024);
  CHECK(first.name == second.name);  // of the segment
  CHECK(first.offset != second.offset);
  // This process's own memory is used where it is.
  const Address base = attach(first.name);
  CHECK(base + static_cast<Address>(first.offset) == one);
  CHECK(world.device->calls("plain_open") == 0);
  vram_engine_detach(pointer(base));
  CHECK(world.device->calls("plain_close") == 0);
  CHECK(holds_in_child([&] {
    Plugged consumer(vram::testing::plain());
    const Address at = attach(first.name);
    const bool opened = at != 0 && consumer.device->calls("plain_open") == 1 && attach(first.name) == at;
    vram_engine_detach(pointer(at));
    vram_engine_detach(pointer(at));
    return opened && consumer.device->calls("plain_open") == 1 && consumer.device->calls("plain_close") == 1;
  }));
  CHECK(world.pool->free(one).ok() && world.pool->free(two).ok() && world.good());
}

// ---- failures and hostile input ---------------------------------------------------------------------------

TEST(a_failed_attach_leaves_nothing_behind) {
  Plugged world;
  const Address block = world.get(100 * kMiB);
  const std::string name = share(block).name;
  const ModelCounts before = world.device->counts();
  const int descriptors = open_descriptors();
  for (const char* call : {"page_export", "page_import", "space_reserve", "map", "set_access"})
    for (std::uint64_t nth = 1; nth <= 2; ++nth) {
      if (nth == 2 && (std::strcmp(call, "space_reserve") == 0 || std::strcmp(call, "set_access") == 0))
        continue;
      REQUIRE(world.device->fail(call, nth, {Code::failed, 7, ""}));
      std::string why;
      CHECK(attach(name, &why) == 0 && why.find("code 7") != std::string::npos);
      const ModelCounts after = world.device->counts();
      CHECK(after.pages == before.pages && after.mappings == before.mappings &&
            after.spaces == before.spaces);
    }
  const Address base = attach(name);
  CHECK(base != 0);
  vram_engine_detach(pointer(base));
  CHECK(open_descriptors() <= descriptors + 1 + ShareServer::kConnections);
  CHECK(world.pool->free(block).ok() && world.good());
}

TEST(wrong_names_are_refused) {
  Plugged world;
  const Address block = world.get(10 * kMiB);
  const std::string name = share(block).name;
  std::string why;
  for (const std::string& wrong :
       {std::string(), std::string("vram2"), std::string(2000, 'x'), name + " ", name + "1 2", " " + name,
        name.substr(0, name.size() - 1), "vram1" + name.substr(5), std::string(64, '\0')})
    CHECK(attach(wrong, &why) == 0 && !why.empty());
  // Every damaged byte: refused, or (the process's number, which is only told to people) accepted.
  for (std::size_t i = 0; i < name.size(); ++i) {
    std::string damaged = name;
    damaged[i] = damaged[i] == '7' ? '8' : '7';
    const Address at = attach(damaged, &why);
    SharedName parsed;
    if (at == 0) continue;
    CHECK(SharedName::parse(damaged, &parsed) && parsed.identity == ShareServer::identity() &&
          parsed.address == block);
    vram_engine_detach(pointer(at));
  }
  const Address base = attach(name);
  CHECK(base != 0);
  vram_engine_detach(pointer(base));
  CHECK(world.pool->free(block).ok() && world.good());
}

TEST(the_server_survives_garbage) {
  Plugged world;
  const Address block = world.get(10 * kMiB);
  const std::string name = share(block).name;
  const PageRequest good = request_for(block, 1);
  const auto closed_after = [&](const void* bytes, std::size_t length) {
    const Socket socket(connect_server(ShareServer::identity(), 10));
    (void)send(socket.fd(), bytes, length, MSG_NOSIGNAL);
    PageAnswer answer;
    std::vector<SharedPage> pages;
    const int error = receive_answer(socket.fd(), &answer, &pages);
    return error == ECONNRESET && pages.empty();
  };
  const std::string long_one(100'000, 'x');
  CHECK(closed_after("x", 1));
  CHECK(closed_after(long_one.data(), long_one.size()));
  CHECK(closed_after(&good, sizeof good - 1));
  PageRequest wrong = good;
  wrong.magic = 1;
  CHECK(closed_after(&wrong, sizeof wrong));
  // Requests in form, for what is not there: refused with an answer.
  const Socket socket(connect_server(ShareServer::identity(), 10));
  PageRequest below = good, beyond = good;
  below.device = -1;
  beyond.device = 1 << 30;
  for (const PageRequest& request :
       {request_for(block, 999), request_for(block + 512, 1), below, beyond, request_for(~Address{0}, 1)}) {
    PageAnswer answer;
    std::vector<SharedPage> pages;
    CHECK(send_request(socket.fd(), request) == 0);
    CHECK(receive_answer(socket.fd(), &answer, &pages) == 0 && pages.empty());
    CHECK(static_cast<Code>(answer.code) == Code::invalid);
  }
  // More connections than it keeps, all silent.
  std::vector<Socket> silent;
  for (int i = 0; i < 2 * ShareServer::kConnections; ++i)
    silent.emplace_back(connect_server(ShareServer::identity(), 10));
  const Address base = attach(name);
  CHECK(base != 0);
  vram_engine_detach(pointer(base));
  CHECK(world.pool->free(block).ok() && world.good());
}

TEST(a_request_beyond_the_last_page_is_answered_with_none) {
  Plugged world;
  const Address block = world.get(10 * kMiB);
  SharedName name;
  REQUIRE(SharedName::parse(share(block).name, &name));
  const Socket socket(connect_server(ShareServer::identity(), 10));
  PageAnswer answer;
  std::vector<SharedPage> pages;
  CHECK(send_request(socket.fd(), request_for(block, name.number, ~std::uint64_t{0})) == 0);
  CHECK(receive_answer(socket.fd(), &answer, &pages) == 0 && pages.empty() && answer.code == 0);
  CHECK(world.pool->free(block).ok());
}

// ---- other processes of the same user
// ----------------------------------------------------------------------

TEST(who_knows_the_address_alone_gets_no_pages) {
  Plugged world;
  const Address block = world.get(10 * kMiB);
  SharedName name;
  REQUIRE(SharedName::parse(share(block).name, &name));
  std::vector<SharedPage> pages;
  REQUIRE(answer_to(request_for(block, name.number), &pages) == 0 && !pages.empty());
  for (const SharedPage& page : pages) ::close(page.fd);
  PageRequest wrong = request_for(block, name.number);
  for (const Digits& secret : {Digits{}, name.identity, name.secrets.answering}) {
    wrong.secret = secret;
    CHECK(answer_to(wrong, &pages) == ECONNRESET && pages.empty());
  }
  for (std::size_t i = 0; i < name.secrets.asking.size(); ++i) {
    wrong.secret = name.secrets.asking;
    wrong.secret[i] ^= 1;
    CHECK(answer_to(wrong, &pages) == ECONNRESET && pages.empty());
  }
  CHECK(world.pool->free(block).ok() && world.good());
}

TEST(another_user_gets_no_pages) {
  if (geteuid() != 0) return;  // only root can become another user
  Plugged world;
  const Address block = world.get(10 * kMiB);
  REQUIRE(!share(block).name.empty());
  const PageRequest request = request_for(block, 1);
  const Digits identity = ShareServer::identity();
  CHECK(holds_in_child([&] {
    if (setgid(65534) != 0 || setuid(65534) != 0) return false;
    const Socket socket(connect_server(identity, 10));
    (void)send_request(socket.fd(), request);
    PageAnswer answer;
    std::vector<SharedPage> pages;
    return receive_answer(socket.fd(), &answer, &pages) == ECONNRESET && pages.empty();
  }));
  CHECK(world.pool->free(block).ok() && world.good());
}

TEST(the_list_of_sockets_shows_the_address_and_no_secret) {
  Plugged world;
  const Address block = world.get(kMiB);
  REQUIRE(!share(block).name.empty());
  std::ifstream file("/proc/net/unix");
  const std::string listed{std::istreambuf_iterator<char>(file), {}};
  const auto contains = [&](const Digits& digits) {
    return listed.find(std::string_view(digits.data(), digits.size())) != std::string::npos;
  };
  if (listed.size() > 200) CHECK(contains(ShareServer::identity()));  // where the system shows this list
  CHECK(!contains(ShareServer::secrets().asking) && !contains(ShareServer::secrets().answering));
  CHECK(ShareServer::secrets().asking != ShareServer::secrets().answering);
  CHECK(world.pool->free(block).ok());
}

TEST(a_server_that_took_over_the_address_is_not_believed) {
  // The process that shared the memory has ended, and another one listens at its address, with a page of its
  // own. It knows no secret.
  Plugged world;
  SharedName name;
  name.identity.fill('0');
  name.secrets.asking.fill('1');
  name.secrets.answering.fill('2');
  name.number = 1;
  name.bytes = 2 * kMiB;
  const Socket listener(bind_server(name.identity));
  REQUIRE(listener.fd() >= 0);
  REQUIRE(fcntl(listener.fd(), F_SETFL, 0) == 0);
  const Address own = world.get(2 * kMiB);
  SharedBlock block;
  REQUIRE(world.pool->share(own, &block).ok());
  std::thread impostor([&] {
    const Socket socket(accept(listener.fd(), nullptr, nullptr));
    char request[sizeof(PageRequest)];
    (void)recv(socket.fd(), request, sizeof request, 0);
    std::vector<SharedPage> pages;
    CHECK(world.pool->export_pages(block.block, block.number, 0, 1, &pages).ok() && pages.size() == 1);
    PageAnswer answer;
    answer.count = pages.size();
    answer.bytes[0] = pages[0].bytes;
    CHECK(send_answer(socket.fd(), answer, pages) == 0);
    for (const SharedPage& page : pages) ::close(page.fd);
  });
  const int descriptors = open_descriptors();
  std::string why;
  CHECK(attach(name.text(), &why) == 0 && why.find("unknown message") != std::string::npos);
  impostor.join();
  CHECK(open_descriptors() <= descriptors);
  CHECK(world.device->calls("page_import") == 0);
  CHECK(world.pool->free(own).ok() && world.good());
}

// ---- fork -------------------------------------------------------------------------------------------------

TEST(a_child_has_a_server_of_its_own) {
  Plugged world;
  const Address block = world.get(10 * kMiB);
  const std::string name = share(block).name;
  CHECK(holds_in_child([&] {
    // The parent's pool is not the child's, and its sockets are closed here.
    if (!share(block).name.empty()) return false;
    Plugged own;
    const Digits parents = ShareServer::identity();
    SharedName outer, inner;
    const Address mine = own.get(10 * kMiB);
    return SharedName::parse(name, &outer) && SharedName::parse(share(mine).name, &inner) &&
           inner.identity != outer.identity && parents == inner.identity &&
           inner.secrets.asking != outer.secrets.asking && attach(share(mine).name) != 0 && attach(name) != 0;
  }));
  const Address base = attach(name);
  CHECK(base != 0);
  vram_engine_detach(pointer(base));
  CHECK(world.pool->free(block).ok() && world.good());
}

TEST(a_child_does_not_keep_the_parents_server_alive) {
  // The producer forks and ends; its child stays. A consumer is told at once that the producer has ended.
  Child producer([](Child& parent) {
    Plugged world;
    parent.write(share(world.get(1000)).name);
    const pid_t child = fork();
    if (child == 0) {
      (void)parent.read();  // stays until the test ends
      _exit(0);
    }
    _exit(0);
  });
  const std::string name = producer.read();
  (void)producer.wait();
  Plugged world;
  std::string why;
  CHECK(attach(name, &why) == 0);
  CHECK(why.find("has ended") != std::string::npos);
}

TEST_MAIN()
