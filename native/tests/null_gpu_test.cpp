// The null GPU without a program on it: memory and its limits, pages, pools, captures, graphs, what copies
// make known, locked host memory, and the sizes of workspaces beside those of an H200.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "null_gpu/contents.hpp"
#include "null_gpu/graphs.hpp"
#include "null_gpu/host.hpp"
#include "null_gpu/memory.hpp"
#include "null_gpu/order.hpp"
#include "null_gpu/pools.hpp"
#include "null_gpu/profile.hpp"
#include "null_gpu/rules.hpp"
#include "null_gpu/unknown.hpp"
#include "null_gpu/values.hpp"
#include "testing.hpp"

using namespace vram::null_gpu;

extern "C" {
Result cuCtxGetDevice(int*);
Result cuCtxGetDevice_v2(int*, Handle);
Result cuCtxSynchronize();
Result cuCtxSynchronize_v2(Handle);
Result cuDeviceGetUuid_v2(Uuid*, int);
Result cuDevicePrimaryCtxRetain(Handle*, int);
Result cuEventElapsedTime(float*, Handle, Handle);
Result cuEventElapsedTime_v2(float*, Handle, Handle);
Result cuGetProcAddress(const char*, void**, int, std::uint64_t);
Result cuGetProcAddress_v2(const char*, void**, int, std::uint64_t, int*);
Result cuGraphNodeGetDependencies(Handle, Handle*, std::size_t*);
Result cuGraphNodeGetDependencies_v2(Handle, Handle*, void*, std::size_t*);
Result cuMemAlloc_v2(DevicePointer*, std::size_t);
Result cuStreamGetCaptureInfo_v2(Handle, int*, std::uint64_t*, Handle*, const Handle**, std::size_t*);
Result cuStreamGetCaptureInfo_v3(Handle, int*, std::uint64_t*, Handle*, const Handle**, const void**,
                                 std::size_t*);
Result cuStreamGetCtx(Handle, Handle*);
Result cuStreamGetCtx_v2(Handle, Handle*, Handle*);
Result cudaDeviceCanAccessPeer(int*, int, int);
Result cudaDeviceDisablePeerAccess(int);
Result cudaDeviceEnablePeerAccess(int, unsigned);
Result cudaEventQuery(Handle);
Result cudaGetDriverEntryPoint(const char*, void**, unsigned long long, int*);
Result cudaGetDriverEntryPointByVersion(const char*, void**, unsigned, unsigned long long, int*);
Result cudaGetLastError();
Result cudaIpcCloseMemHandle(void*);
Result cudaMallocAsync(void**, std::size_t, Handle);
Result cudaMemcpyPeerAsync(void*, int, const void*, int, std::size_t, Handle);
Result cudaPeekAtLastError();
Result cudaStreamEndCapture(Handle, Handle*);
Result cudaStreamGetCaptureInfo(Handle, int*, std::uint64_t*, Handle*, const Handle**, const void**,
                                std::size_t*);
Result cudaStreamGetCaptureInfo_v2(Handle, int*, std::uint64_t*, Handle*, const Handle**, std::size_t*);
Result cudaStreamGetCaptureInfo_v3(Handle, int*, std::uint64_t*, Handle*, const Handle**, const void**,
                                   std::size_t*);
int ncclAllReduce(const void*, void*, std::size_t, int, int, Handle, Handle);
int ncclBroadcast(const void*, void*, std::size_t, int, int, Handle, Handle);
int ncclCommDestroy(Handle);
int ncclCommInitAll(Handle*, int, const int*);
int ncclReduce(const void*, void*, std::size_t, int, int, int, Handle, Handle);
}

namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kTotal = 1024 * kMiB, kOverhead = 24 * kMiB;

// Before main: the profile is read once.
const bool kSet = setenv("VRAM_NULL_GPU", "name=Test;memory=1073741824;overhead=25165824;devices=2", 1) == 0;

Memory& memory() { return *memory_of(0); }

TEST(the_profile_says_what_there_is) {
  CHECK(kSet);
  CHECK(Profile::get().name == "Test");
  CHECK(memory_of(1) != nullptr && memory_of(2) == nullptr && memory_of(-1) == nullptr);
  std::uint64_t free = 0, total = 0;
  memory_of(1)->info(&free, &total);
  CHECK(total == kTotal && free == kTotal - kOverhead);
}

TEST(memory_ends_where_the_device_ends) {
  DevicePointer first = 0, second = 0;
  CHECK(memory().allocate(kTotal - kOverhead + 1, &first) == kOutOfMemory && first == 0);
  CHECK(memory().allocate(~std::uint64_t{0}, &first) == kOutOfMemory);
  CHECK(memory().allocate(kTotal - kOverhead, &first) == kSuccess);
  CHECK(memory().allocate(1, &second) == kOutOfMemory);
  CHECK(memory().used() == kTotal && memory().peak() == kTotal);
  CHECK(memory().free(first + 1) == kInvalidValue);
  CHECK(memory().free(first) == kSuccess && memory().free(first) == kInvalidValue);
  CHECK(memory().free(0) == kSuccess);
  CHECK(memory().used() == kOverhead && memory().peak() == kTotal);
}

// Allocations do not overlap, whatever the order of calls, and a freed range of the same size is used again.
TEST(addresses_never_overlap) {
  std::mt19937 dice(7);
  std::vector<std::pair<DevicePointer, std::uint64_t>> held;
  for (int i = 0; i < 3000; ++i) {
    if (held.empty() || dice() % 3 != 0) {
      const std::uint64_t bytes = (1 + dice() % 20) * kMiB;
      DevicePointer made = 0;
      if (memory().allocate(bytes, &made) != kSuccess) continue;
      for (const auto& [address, length] : held) CHECK(made + bytes <= address || made >= address + length);
      held.emplace_back(made, bytes);
    } else {
      const std::size_t which = dice() % held.size();
      CHECK(memory().free(held[which].first) == kSuccess);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
    }
  }
  for (const auto& [address, bytes] : held) CHECK(memory().free(address) == kSuccess);
  CHECK(memory().used() == kOverhead);
}

TEST(pages_are_kept_while_held_or_mapped) {
  const DevicePointer range = Addresses::get().take(8 * kMiB);
  std::uint64_t page = 0, again = 0;
  CHECK(memory().page_create(3, &page) == kInvalidValue);
  CHECK(memory().page_create(4 * kMiB, &page) == kSuccess);
  CHECK(memory().map(range + 1, 4 * kMiB, page) == kInvalidValue);
  CHECK(memory().map(range, 4 * kMiB, page) == kSuccess);
  CHECK(memory().map(range + 2 * kMiB, 4 * kMiB, page) == kInvalidValue);  // overlaps
  CHECK(memory().page_retain(range + kMiB, &again) == kSuccess && again == page);
  CHECK(memory().page_release(page) == kSuccess && memory().page_release(page) == kSuccess);
  CHECK(memory().page_release(page) == kInvalidValue);
  CHECK(memory().used() == kOverhead + 4 * kMiB);  // the mapping keeps it
  CHECK(memory().unmap(range, 2 * kMiB) == kInvalidValue);
  CHECK(memory().unmap(range, 4 * kMiB) == kSuccess);
  CHECK(memory().used() == kOverhead);
  Addresses::get().give(range, 8 * kMiB);
}

TEST(a_page_is_kept_while_a_descriptor_or_an_import_has_it) {
  std::uint64_t plain = 0, page = 0, first = 0, second = 0;
  int one = -1, two = -1;
  CHECK(memory().page_create(2 * kMiB, &plain) == kSuccess);
  CHECK(memory().page_export(plain, &one) == kInvalidValue);  // not created for it
  CHECK(memory().page_release(plain) == kSuccess);
  CHECK(memory().page_create(4 * kMiB, &page, true) == kSuccess);
  CHECK(memory().page_export(page, &one) == kSuccess && memory().page_export(page, &two) == kSuccess);
  CHECK(one != two && (fcntl(one, F_GETFD) & FD_CLOEXEC) != 0);
  CHECK(memory().page_release(page) == kSuccess && close(two) == 0);
  CHECK(memory().used() == kOverhead + 4 * kMiB);  // the other descriptor keeps it
  CHECK(Memory::page_import(one, &first) == kSuccess && Memory::page_import(one, &second) == kSuccess);
  CHECK(first != page && second != page && first != second);
  CHECK(memory().page_export(first, &two) == kInvalidValue);
  const DevicePointer range = Addresses::get().take(4 * kMiB);
  CHECK(memory().map(range, 4 * kMiB, first) == kSuccess);
  CHECK(close(one) == 0 && memory().page_release(first) == kSuccess &&
        memory().page_release(second) == kSuccess);
  CHECK(memory().used() == kOverhead + 4 * kMiB);  // the mapping keeps it, and it is counted once
  CHECK(memory().unmap(range, 4 * kMiB) == kSuccess && memory().used() == kOverhead);
  Addresses::get().give(range, 4 * kMiB);
  int pipes[2];
  CHECK(pipe(pipes) == 0 && Memory::page_import(-1, &page) == kUnknownError);
  CHECK(Memory::page_import(pipes[0], &page) == kInvalidValue);
  CHECK(close(pipes[0]) == 0 && close(pipes[1]) == 0);
}

// Sends a descriptor, or receives one, over a Unix socket.
int pass(int socket, int descriptor) {
  char byte = 0, control[CMSG_SPACE(sizeof(int))] = {};
  iovec data{&byte, 1};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  if (descriptor < 0 && recvmsg(socket, &message, 0) != 1) return -1;
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (descriptor < 0) {
    std::memcpy(&descriptor, CMSG_DATA(header), sizeof(int));
    return descriptor;
  }
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  return sendmsg(socket, &message, 0) == 1 ? descriptor : -1;
}

int use_a_page_of_another_process(int socket) {
  const int descriptor = pass(socket, -1);
  std::uint64_t page = 0;
  char byte = 0;
  const DevicePointer range = Addresses::get().take(4 * kMiB);
  if (Memory::page_import(descriptor, &page) != kSuccess || close(descriptor) != 0) return 1;
  if (memory().used() != kOverhead || memory().map(range, 4 * kMiB, page) != kSuccess) return 2;
  if (memory().map(range + 4 * kMiB, 6 * kMiB, page) != kInvalidValue) return 3;  // larger than it is
  if (write(socket, &byte, 1) != 1 || read(socket, &byte, 1) != 1) return 4;
  if (memory().unmap(range, 4 * kMiB) != kSuccess || memory().page_release(page) != kSuccess) return 5;
  return memory().used() == kOverhead ? 0 : 6;
}

TEST(a_page_counts_for_its_creator_until_all_processes_have_released_it) {
  int sockets[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  const pid_t child = fork();
  if (child == 0) _exit(use_a_page_of_another_process(sockets[1]));
  CHECK(close(sockets[1]) == 0);  // so that a child that fails is noticed
  std::uint64_t page = 0;
  int descriptor = -1, status = -1;
  char byte = 0;
  CHECK(memory().page_create(4 * kMiB, &page, true) == kSuccess);
  CHECK(memory().page_export(page, &descriptor) == kSuccess && pass(sockets[0], descriptor) == descriptor);
  CHECK(close(descriptor) == 0 && read(sockets[0], &byte, 1) == 1);
  CHECK(memory().page_release(page) == kSuccess && memory().used() == kOverhead + 4 * kMiB);
  CHECK(write(sockets[0], &byte, 1) == 1 && waitpid(child, &status, 0) == child && status == 0);
  CHECK(memory().used() == kOverhead);
  CHECK(close(sockets[0]) == 0);
}

int open_descriptors() {
  int open = 0;
  for (int each = 0; each < 1024; ++each) open += fcntl(each, F_GETFD) != -1;
  return open;
}

// As many processes as share, so many descriptors: not one for each page.
TEST(sharing_many_pages_keeps_one_descriptor_here_and_one_for_each_other_process) {
  constexpr int kPages = 200;
  const int before = open_descriptors();
  std::vector<std::uint64_t> pages(kPages), imported(kPages);
  for (int i = 0; i < kPages; ++i) {
    int descriptor = -1;
    CHECK(memory().page_create(2 * kMiB, &pages[i], true) == kSuccess);
    CHECK(memory().page_export(pages[i], &descriptor) == kSuccess);
    CHECK(Memory::page_import(descriptor, &imported[i]) == kSuccess && close(descriptor) == 0);
  }
  CHECK(open_descriptors() <= before + 2);
  for (const std::uint64_t page : pages) CHECK(memory().page_release(page) == kSuccess);
  CHECK(memory().used() == kOverhead + kPages * 2 * kMiB);  // the imports keep them
  for (int i = 0; i < kPages; i += 2) CHECK(memory().page_release(imported[i]) == kSuccess);
  CHECK(memory().used() == kOverhead + kPages * kMiB);
  for (int i = 1; i < kPages; i += 2) CHECK(memory().page_release(imported[i]) == kSuccess);
  CHECK(memory().used() == kOverhead);
  CHECK(open_descriptors() <= before + 1);
}

// The importer is killed: its lock ends with it.
TEST(a_page_is_free_once_a_process_that_imported_it_was_killed) {
  int sockets[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  std::uint64_t page = 0;
  int descriptor = -1, status = -1;
  char byte = 0;
  const pid_t child = fork();
  if (child == 0) {
    const int received = pass(sockets[1], -1);
    if (Memory::page_import(received, &page) != kSuccess || close(received) != 0) _exit(1);
    if (write(sockets[1], &byte, 1) != 1) _exit(2);
    pause();
  }
  CHECK(close(sockets[1]) == 0);  // so that a child that fails is noticed
  CHECK(memory().page_create(4 * kMiB, &page, true) == kSuccess);
  CHECK(memory().page_export(page, &descriptor) == kSuccess && pass(sockets[0], descriptor) == descriptor);
  CHECK(close(descriptor) == 0 && read(sockets[0], &byte, 1) == 1);
  CHECK(memory().page_release(page) == kSuccess && memory().used() == kOverhead + 4 * kMiB);
  CHECK(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child);
  CHECK(memory().used() == kOverhead);
  CHECK(close(sockets[0]) == 0);
}

TEST(what_another_process_imports_of_a_pool_counts_for_the_pool) {
  MemoryPool plain(0), shared(0, 0, MemoryPool::Kind::shareable);
  DevicePointer own = 0, found = 0, again = 0;
  MemoryPool::Pointer pointer;
  int descriptor = -1;
  CHECK(plain.share(&descriptor) == kInvalidValue && shared.share(&descriptor) == kSuccess);
  CHECK(plain.allocate(kMiB, &own) == kSuccess && MemoryPool::share(own, &pointer) == kInvalidValue);
  CHECK(plain.free(own) == kSuccess && MemoryPool::share(own, &pointer) == kInvalidValue);
  CHECK(shared.allocate(3 * kMiB, &own) == kSuccess && MemoryPool::share(own, &pointer) == kSuccess);
  const std::uint64_t used = memory().used();
  MemoryPool* imported = nullptr;
  CHECK(MemoryPool::import(0, &imported) == kInvalidValue &&
        MemoryPool::import(-1, &imported) == kInvalidValue);
  CHECK(MemoryPool::import(descriptor, &imported) == kSuccess && close(descriptor) == 0);
  CHECK(imported->allocate(512, &again) == kInvalidValue);
  CHECK(shared.import(pointer, &again) == kInvalidValue);
  CHECK(imported->import(pointer, &found) == kSuccess && imported->import(pointer, &again) == kSuccess);
  CHECK(found != own && again != found && memory().used() == used);
  DevicePointer begin = 0;
  std::uint64_t bytes = 0;
  CHECK(memory().find(found + 5, &begin, &bytes) && begin == found && bytes == 3 * kMiB);
  pointer.kind[0] = 'x';
  CHECK(imported->import(pointer, &again) == kInvalidValue);
  CHECK(MemoryPool::free_anywhere(found) == kSuccess && imported->free(found) == kNotFound);
  delete imported;  // with what is still imported
  CHECK(!memory().find(again, &begin, &bytes) && shared.free(own) == kSuccess);
}

TEST(pools_keep_what_their_threshold_says) {
  MemoryPool pool(0, 256 * kMiB);
  DevicePointer first = 0, second = 0;
  CHECK(pool.allocate(10 * kMiB, &first) == kSuccess && pool.allocate(40 * kMiB, &second) == kSuccess);
  std::uint64_t reserved = 0, used = 0;
  const auto read = [&] { return pool.get(5, &reserved) == kSuccess && pool.get(7, &used) == kSuccess; };
  CHECK(read() && used == 50 * kMiB && reserved == 64 * kMiB && memory().used() == kOverhead + reserved);
  DevicePointer begin = 0;
  std::uint64_t bytes = 0;
  CHECK(memory().find(second + 5, &begin, &bytes) && begin == second && bytes == 40 * kMiB);
  CHECK(MemoryPool::free_anywhere(second) == kSuccess && MemoryPool::free_anywhere(second) == kNotFound);
  CHECK(read() && used == 10 * kMiB && reserved == 64 * kMiB);
  const std::uint64_t threshold = 40 * kMiB;
  CHECK(pool.set(4, &threshold) == kSuccess);
  pool.synchronize();
  CHECK(read() && reserved == 64 * kMiB);  // whole pieces
  pool.trim(0);
  CHECK(read() && reserved == 32 * kMiB);
  CHECK(pool.allocate(250 * kMiB, &second) == kOutOfMemory);  // its own limit
  CHECK(pool.free(first) == kSuccess && pool.free(first) == kNotFound);
}

TEST(captured_work_follows_what_its_stream_waited_for) {
  Order& order = Order::get();
  const Handle one = order.stream_create(0), two = order.stream_create(0), event = order.event_create();
  order.queued(one);
  CHECK(order.last_nodes(one).empty());  // not captured
  CHECK(order.capture_begin(one) == kSuccess);
  order.queued(one);
  const std::vector<Handle> first = order.last_nodes(one);
  CHECK(first.size() == 1 && order.followed_by(first[0]).empty());
  CHECK(order.event_record(event, one) == kSuccess && order.stream_wait(two, event) == kSuccess);
  order.queued(two);
  const std::vector<Handle> second = order.last_nodes(two);
  CHECK(second.size() == 1 && order.followed_by(second[0]) == first && order.last_nodes(one) == first);
  CHECK(order.event_record(event, two) == kSuccess && order.stream_wait(one, event) == kSuccess);
  CHECK(order.last_nodes(one).size() == 2);
  order.queued(one);
  CHECK(order.followed_by(order.last_nodes(one)[0]) == (std::vector<Handle>{first[0], second[0]}));
  Handle graph = nullptr;
  CHECK(order.capture_end(one, &graph) == kSuccess && order.last_nodes(two).empty());
}

TEST(a_capture_spreads_over_events) {
  Order& order = Order::get();
  const Handle one = order.stream_create(0), two = order.stream_create(0), event = order.event_create();
  Handle graph = nullptr;
  CHECK(order.capture_end(one, &graph) == kCaptureUnmatched);
  CHECK(order.capture_begin(one) == kSuccess && order.capture_of(two) == 0);
  CHECK(order.event_record(event, one) == kSuccess && order.stream_wait(two, event) == kSuccess);
  CHECK(order.capture_of(two) == order.capture_of(one));
  CHECK(order.stream_query(two) == kCaptureImplicit);
  CHECK(order.capture_end(two, &graph) == kCaptureUnmatched);
  CHECK(order.capture_end(one, &graph) == kSuccess && graph != nullptr);
  CHECK(order.capture_of(two) == 0 && order.stream_query(two) == kSuccess);
  CHECK(order.stream_wait(two, event) == kSuccess && order.capture_of(two) == 0);  // that capture has ended
  CHECK(order.stream_destroy(one) == kSuccess && order.stream_destroy(one) == kInvalidHandle);
  CHECK(order.event_destroy(event) == kSuccess && order.event_query(event) == kInvalidHandle);
  CHECK(order.stream_destroy(two) == kSuccess);
}

TEST(graphs_keep_objects_until_all_are_gone) {
  static int ended = 0;
  Graphs& graphs = Graphs::get();
  const Handle graph = new_handle();
  const Handle object = graphs.object_create(&ended, [](void* count) { ++*static_cast<int*>(count); }, 1);
  CHECK(graphs.retain(graph, object, 1, 1) == kSuccess);  // the caller's reference moves
  const Handle executable = graphs.instantiate(graph);
  CHECK(graphs.destroy(graph) == kSuccess && ended == 0);
  CHECK(graphs.destroy(executable) == kSuccess && ended == 1);
  CHECK(graphs.object_release(object, 1) == kInvalidValue &&
        graphs.retain(graph, object, 1, 0) == kInvalidValue);
}

TEST(copies_are_known_until_a_kernel_runs) {
  DevicePointer place = 0;
  CHECK(memory().allocate(4 * kMiB, &place) == kSuccess);
  char* const device = reinterpret_cast<char*>(place);
  const std::vector<char> sent = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<char> got(8, 9);
  copied(device, sent.data(), 8);
  copied(device + kMiB, device + 2, 4);
  copied(got.data(), device + kMiB, 4);
  CHECK(std::memcmp(got.data(), sent.data() + 2, 4) == 0);
  filled(device + 4, 0x11, 2);  // overwrites a part: the whole piece is forgotten, never wrong
  copied(got.data(), device, 8);
  CHECK(got == std::vector<char>(8, 0));
  copied(got.data(), device + 4, 2);
  CHECK(got[0] == 0x11 && got[1] == 0x11);
  kernel_launched();
  copied(got.data(), device + kMiB, 4);
  CHECK(got[0] == 0 && got[3] == 0);
  CHECK(memory().free(place) == kSuccess);
}

// Weights are copied to the device first; what decides comes after them.
TEST(a_few_bytes_are_known_however_much_is_copied_before_and_after_them) {
  constexpr std::size_t kWeights = 24 * kMiB;
  DevicePointer place = 0;
  CHECK(memory().allocate(512 * kMiB, &place) == kSuccess);
  char* const device = reinterpret_cast<char*>(place);
  const std::vector<char> weights(kWeights, 7);
  const auto copy_weights = [&](std::uint64_t at) { copied(device + at, weights.data(), kWeights); };
  std::uint64_t sizes[2] = {148, 24}, got[2] = {};
  for (std::uint64_t layer = 0; layer < 8; ++layer) copy_weights(layer * kWeights);
  copied(device + 400 * kMiB, sizes, sizeof(sizes));
  for (std::uint64_t layer = 8; layer < 16; ++layer) copy_weights(layer * kWeights);
  copied(got, device + 400 * kMiB, sizeof(got));
  CHECK(got[0] == 148 && got[1] == 24);
  char one = 0;
  copied(&one, device + 15 * kWeights, 1);  // of equal pieces the newest are known
  CHECK(one == 7);
  copied(&one, device, 1);
  CHECK(one == 0);
  kernel_launched();
  CHECK(memory().free(place) == kSuccess);
}

// As after a gather, whose parts come one by one.
TEST(what_lies_side_by_side_is_known_as_a_whole) {
  DevicePointer place = 0;
  CHECK(memory().allocate(2 * kMiB, &place) == kSuccess);
  char* const device = reinterpret_cast<char*>(place);
  const int parts[2] = {3, 4};
  int got[2] = {};
  copied(device, &parts[0], sizeof(int));
  copied(device + sizeof(int), &parts[1], sizeof(int));
  copied(device + kMiB, device, sizeof(parts));
  copied(got, device + kMiB, sizeof(got));
  CHECK(got[0] == 3 && got[1] == 4);
  copied(got, device + 4, sizeof(got));  // half of it is not known
  CHECK(got[0] == 0 && got[1] == 0);
  kernel_launched();
  CHECK(memory().free(place) == kSuccess);
}

TEST(ranks_that_neither_send_nor_receive_name_no_memory) {
  DevicePointer place = 0;
  CHECK(memory().allocate(2 * kMiB, &place) == kSuccess);
  void* const device = reinterpret_cast<void*>(place);
  void* communicators[2] = {};
  int value = 5, got = 0;
  CHECK(ncclCommInitAll(communicators, 2, nullptr) == 0);
  copied(device, &value, sizeof(value));
  CHECK(ncclReduce(device, nullptr, 1, 2, 0, 0, communicators[1], nullptr) == 0);
  copied(&got, device, sizeof(got));
  CHECK(got == 5);
  CHECK(ncclBroadcast(nullptr, device, 1, 2, 0, communicators[1], nullptr) == 0);
  copied(&got, device, sizeof(got));
  CHECK(got == 0);  // what the root sends is not known here
  for (void* const each : communicators) CHECK(ncclCommDestroy(each) == 0);
  CHECK(memory().free(place) == kSuccess);
}

// The thread by which PyTorch finds out that collectives are complete, so that what they use can be released.
Result seen_by_the_watchdog(Handle event) {
  Result result = kUnknownError;
  std::thread([&] {
    (void)pthread_setname_np(pthread_self(), "pt_nccl_watchdg");
    result = cudaEventQuery(event);
  }).join();
  return result;
}

TEST(collectives_complete_late_for_the_watchdog_alone) {
  Order& order = Order::get();
  void* communicator = nullptr;
  CHECK(ncclCommInitAll(&communicator, 1, nullptr) == 0);
  const Handle stream = order.stream_create(0), other = order.stream_create(0);
  const Handle event = order.event_create();
  CHECK(ncclAllReduce(nullptr, nullptr, 0, 2, 0, communicator, stream) == 0);
  CHECK(order.event_record(event, stream) == kSuccess);
  CHECK(seen_by_the_watchdog(event) == kNotReady && cudaEventQuery(event) == kSuccess);
  CHECK(order.event_record(event, other) == kSuccess && seen_by_the_watchdog(event) == kSuccess);
  CHECK(order.event_record(event, stream) == kSuccess && ncclCommDestroy(communicator) == 0);
  CHECK(seen_by_the_watchdog(event) == kSuccess);  // the program has waited for all of them
  CHECK(order.event_destroy(event) == kSuccess);
  CHECK(order.stream_destroy(stream) == kSuccess && order.stream_destroy(other) == kSuccess);
}

TEST(devices_access_others_once_it_is_enabled) {
  int can = -1;
  CHECK(cudaDeviceCanAccessPeer(&can, 0, 1) == kSuccess && can == 1);
  CHECK(cudaDeviceCanAccessPeer(&can, 1, 1) == kSuccess && can == 0);
  CHECK(cudaDeviceCanAccessPeer(&can, 0, 2) == kInvalidDevice);
  CHECK(cudaDeviceEnablePeerAccess(0, 0) == kPeerUnsupported);  // the device itself
  CHECK(cudaDeviceEnablePeerAccess(2, 0) == kInvalidDevice);
  CHECK(cudaDeviceEnablePeerAccess(1, 0) == kSuccess && cudaDeviceEnablePeerAccess(1, 0) == kPeerEnabled);
  CHECK(cudaDeviceDisablePeerAccess(1) == kSuccess && cudaDeviceDisablePeerAccess(1) == kPeerNotEnabled);
  CHECK(cudaGetLastError() == kPeerNotEnabled);
}

TEST(copies_between_devices_carry_what_is_known) {
  DevicePointer here = 0, there = 0;
  CHECK(memory().allocate(2 * kMiB, &here) == kSuccess &&
        memory_of(1)->allocate(2 * kMiB, &there) == kSuccess);
  const int sent = 42;
  int got = 0;
  void *const from = reinterpret_cast<void*>(here), *const to = reinterpret_cast<void*>(there);
  copied(from, &sent, sizeof(sent));
  CHECK(cudaMemcpyPeerAsync(to, 1, from, 0, sizeof(sent), nullptr) == kSuccess);
  copied(&got, to, sizeof(got));
  CHECK(got == sent);
  CHECK(cudaMemcpyPeerAsync(to, 2, from, 0, sizeof(sent), nullptr) == kInvalidDevice);
  CHECK(cudaGetLastError() == kInvalidDevice);
  CHECK(memory().free(here) == kSuccess && memory_of(1)->free(there) == kSuccess);
}

TEST(locked_memory_says_what_it_is) {
  LockedMemory& locked = LockedMemory::get();
  std::vector<char> mine(100);
  void* made = nullptr;
  CHECK(locked.allocate(10, &made) == kSuccess && locked.holds(static_cast<char*>(made) + 9));
  CHECK(!locked.holds(static_cast<char*>(made) + 10) && locked.unlock(made) == kNotLocked);
  CHECK(locked.lock(mine.data() + 10, 50) == kSuccess && !locked.holds(mine.data()));
  CHECK(locked.lock(mine.data(), 11) == kAlreadyLocked && locked.lock(mine.data() + 59, 5) == kAlreadyLocked);
  CHECK(locked.free(mine.data() + 10) == kInvalidValue && locked.unlock(mine.data() + 10) == kSuccess);
  CHECK(locked.free(made) == kSuccess && !locked.holds(made));
}

template <typename Function>
bool is(void* found, Function* function) {
  return found == reinterpret_cast<void*>(function);
}

// A program asks for the functions of the CUDA version it was built with, and calls them with its parameters.
TEST(functions_of_the_driver_have_the_form_of_the_version_asked_for) {
  CHECK(is(driver_function("cuStreamGetCaptureInfo", 12020), &cuStreamGetCaptureInfo_v2));
  CHECK(is(driver_function("cuStreamGetCaptureInfo", 12030), &cuStreamGetCaptureInfo_v3));
  CHECK(is(driver_function("cuStreamGetCaptureInfo", 0), &cuStreamGetCaptureInfo_v3));  // the driver's: 13.0
  CHECK(is(driver_function("cuGraphNodeGetDependencies", 12020), &cuGraphNodeGetDependencies));
  CHECK(is(driver_function("cuGraphNodeGetDependencies", 12030), &cuGraphNodeGetDependencies_v2));
  CHECK(is(driver_function("cuCtxGetDevice", 12090), &cuCtxGetDevice));
  CHECK(is(driver_function("cuCtxGetDevice", 13000), &cuCtxGetDevice_v2));
  CHECK(is(driver_function("cuCtxSynchronize", 12090), &cuCtxSynchronize));
  CHECK(is(driver_function("cuCtxSynchronize", 13000), &cuCtxSynchronize_v2));
  CHECK(is(driver_function("cuStreamGetCtx", 12040), &cuStreamGetCtx));
  CHECK(is(driver_function("cuStreamGetCtx", 12050), &cuStreamGetCtx_v2));
  CHECK(is(driver_function("cuEventElapsedTime", 12070), &cuEventElapsedTime));
  CHECK(is(driver_function("cuEventElapsedTime", 12080), &cuEventElapsedTime_v2));
  CHECK(is(driver_function("cuGetProcAddress", 11080), &cuGetProcAddress));
  CHECK(is(driver_function("cuGetProcAddress", 12000), &cuGetProcAddress_v2));
  CHECK(is(driver_function("cuDeviceGetUuid", 11040), &cuDeviceGetUuid_v2));
  CHECK(is(driver_function("cuMemAlloc", 11030), &cuMemAlloc_v2));  // older than any version asked for
  CHECK(is(driver_function("cuDevicePrimaryCtxRetain", 13000), &cuDevicePrimaryCtxRetain));
}

// A form that the null GPU does not have is not replaced by another, which has other parameters.
TEST(a_form_of_a_function_that_does_not_exist_is_unknown) {
  CHECK(driver_function("cuGraphAddNode", 12020) == stub_for("cuGraphAddNode"));
  CHECK(driver_function("cuGraphAddNode", 12030) == stub_for("cuGraphAddNode_v2"));
  CHECK(driver_function("cuCtxCreate", 12040) == stub_for("cuCtxCreate_v3"));
  CHECK(driver_function("cuCtxCreate", 12050) == stub_for("cuCtxCreate_v4"));
  CHECK(driver_function("cuNothing", 13000) == stub_for("cuNothing"));
}

TEST(the_version_reaches_the_search_for_functions) {
  void* found = nullptr;
  int status = 7;
  CHECK(cuGetProcAddress_v2("cuStreamGetCaptureInfo", &found, 12000, 0, &status) == kSuccess && status == 0);
  CHECK(is(found, &cuStreamGetCaptureInfo_v2));
  CHECK(cuGetProcAddress("cuStreamGetCaptureInfo", &found, 13000, 0) == kSuccess);
  CHECK(is(found, &cuStreamGetCaptureInfo_v3));
  CHECK(cudaGetDriverEntryPointByVersion("cuCtxGetDevice", &found, 12000, 0, &status) == kSuccess);
  CHECK(is(found, &cuCtxGetDevice));
  CHECK(cudaGetDriverEntryPoint("cuCtxGetDevice", &found, 0, nullptr) == kSuccess);
  CHECK(is(found, &cuCtxGetDevice_v2));  // the runtime is of CUDA 13 here
}

TEST(all_forms_say_the_same_about_a_capture) {
  const Handle stream = Order::get().stream_create(0);
  const auto ask = [&](bool capturing) {
    struct Answer {
      int status = -1;
      std::uint64_t id = 1;
      Handle graph = nullptr;
      const Handle* nodes = &graph;
      const void* edges = this;
      std::size_t count = 1;
    } old, edged, runtime, runtime_old, runtime_edged;
    CHECK(cuStreamGetCaptureInfo_v2(stream, &old.status, &old.id, &old.graph, &old.nodes, &old.count) ==
          kSuccess);
    const auto call = [&](auto* function, Answer& out) {
      CHECK(function(stream, &out.status, &out.id, &out.graph, &out.nodes, &out.edges, &out.count) ==
            kSuccess);
      CHECK(out.edges == nullptr);
    };
    call(&cuStreamGetCaptureInfo_v3, edged);
    call(&cudaStreamGetCaptureInfo, runtime);
    call(&cudaStreamGetCaptureInfo_v3, runtime_edged);
    CHECK(cudaStreamGetCaptureInfo_v2(stream, &runtime_old.status, &runtime_old.id, &runtime_old.graph,
                                      &runtime_old.nodes, &runtime_old.count) == kSuccess);
    for (const Answer& each : {old, edged, runtime, runtime_old, runtime_edged}) {
      CHECK(each.status == (capturing ? kCaptureActive : kCaptureNone));
      CHECK((each.id != 0) == capturing && each.id == old.id && each.graph == old.graph);
      CHECK((each.graph != nullptr) == capturing && each.nodes == nullptr && each.count == 0);
    }
    int status = -1;
    CHECK(cuStreamGetCaptureInfo_v3(stream, &status, nullptr, nullptr, nullptr, nullptr, nullptr) ==
          kSuccess);
    CHECK(status == old.status);
  };
  Handle graph = nullptr;
  ask(false);
  CHECK(Order::get().capture_begin(stream) == kSuccess);
  ask(true);
  CHECK(Order::get().capture_end(stream, &graph) == kSuccess);
  CHECK(Order::get().stream_destroy(stream) == kSuccess);
}

// Whichever file they are in: memory pools, sharing, graphs.
TEST(the_runtime_remembers_its_last_error) {
  CHECK(cudaGetLastError() == kSuccess);
  void* out = nullptr;
  CHECK(cudaMallocAsync(&out, 2 * kTotal, nullptr) == kOutOfMemory);
  CHECK(cudaPeekAtLastError() == kOutOfMemory && cudaGetLastError() == kOutOfMemory);
  CHECK(cudaGetLastError() == kSuccess);
  Handle graph = nullptr;
  CHECK(cudaStreamEndCapture(nullptr, &graph) == kCaptureUnmatched &&
        cudaGetLastError() == kCaptureUnmatched);
  CHECK(cudaIpcCloseMemHandle(nullptr) == kInvalidValue && cudaGetLastError() == kInvalidValue);
  CHECK(cudaEventQuery(nullptr) == kInvalidHandle && cudaGetLastError() == kInvalidHandle);
}

bool near(std::uint64_t value, double truth, double share) {
  return static_cast<double>(value) > truth * (1 - share) && static_cast<double>(value) < truth * (1 + share);
}

// Answers of cuDNN 9.19 on an H200: weights, reserve and workspace.
TEST(recurrent_networks_need_what_an_h200_answers) {
  const RnnShape lstm{2, false, 2, 35 * 64, 64, 512, 512, 512, 4},
      both{2, true, 3, 35 * 64, 64, 512, 512, 512, 4};
  CHECK(rnn_weights(lstm) == 16809984 && near(rnn_reserve(lstm), 50462976, 0.01));
  CHECK(near(rnn_workspace(lstm), 63701760, 0.1));
  CHECK(rnn_weights(both) == 67207168 && near(rnn_reserve(both), 155975936, 0.01));
  CHECK(near(rnn_workspace(both), 195691264, 0.1));
  const RnnShape gru{3, false, 1, 10 * 4, 4, 16, 32, 32, 4};
  CHECK(rnn_weights(gru) == 19200 && near(rnn_workspace(gru), 8435488, 0.1));
}

// Answers of cuDNN 9.19 on an H200, in float and half: rows, channels, forward and backward.
TEST(batch_normalization_needs_what_an_h200_answers) {
  const struct {
    std::uint64_t rows, channels, forward, forward_half, backward;
  } answers[] = {
      {802816, 256, 25891904, 10358240, 17128496},
      {3211264, 32, 25891892, 10357712, 17127972},
      {49, 2048, 17712, 17712, 17568},
      {12544, 2048, 3237552, 1305648, 2147488},
      {25600, 100, 413880, 166200, 274472},
      {1048576, 3, 148532, 60080, 88452},
      {1058, 1, 1256, 1148, 1156},
      {1058, 17, 5568, 2928, 4136},
  };
  for (const auto& each : answers) {
    CHECK(norm_workspace(each.rows, each.channels, true, 4) == each.forward);
    CHECK(norm_workspace(each.rows, each.channels, true, 2) == each.forward_half);
    CHECK(norm_workspace(each.rows, each.channels, false, 4) == each.backward);
    CHECK(norm_workspace(each.rows, each.channels, false, 2) == each.backward);
    CHECK(norm_workspace(each.rows, each.channels, true, 8) == 0);
  }
}

// Answers of cuFFT 12.0 on an H200.
TEST(transforms_need_what_an_h200_answers) {
  const std::int64_t small[] = {1024, 1024}, large[] = {1048576}, prime[] = {999983};
  CHECK(fft_workspace(2, small, 16, 8, false) == 0);
  CHECK(fft_workspace(1, large, 16, 8, false) == 134217728 &&
        near(fft_workspace(1, large, 16, 8, true), 67108992, 0.01));
  CHECK(near(fft_workspace(1, prime, 16, 8, false), 512000000, 0.01));
}

// Answers of cuDNN 9.19 for filter gradients of a U-Net: the first number without a device, the second on an
// H200.
TEST(convolutions_need_what_an_h200_answers) {
  const auto bytes = [](std::int64_t filters, std::int64_t channels, std::int64_t points, Tiling tiling,
                        std::uint64_t answered) {
    Convolution convolution;
    convolution.direction = Convolution::filter;
    convolution.input = {8, channels, points, points};
    convolution.filter_sizes = {filters, channels, 3, 3};
    convolution.output = {8, filters, points, points};
    convolution.steps = convolution.padding = {1, 1};
    convolution.element_bytes = 2;
    convolution.channels_last = true;
    return convolution_workspace(convolution, tiling, true, answered);
  };
  CHECK(bytes(128, 128, 192, {0, 1, 3, true}, 1179843) == 7668375);
  CHECK(bytes(1024, 512, 24, {0, 1, 3, true}, 131) == 7078267);
  CHECK(bytes(512, 1024, 48, {0, 1, 4, true}, 131) == 6291811);
  CHECK(bytes(64, 128, 384, {7, 1, 4, true}, 0) == 3932847);
  CHECK(bytes(512, 512, 48, {0, 1, 1, false}, 131) == 0);
  CHECK(bytes(1024, 1024, 24, {0, 1, 4, true}, 131) == 131);
}

TEST(a_plan_behind_the_first_needs_its_own_workspace) {
  Convolution convolution;
  convolution.input = convolution.output = {32, 256, 16, 16};
  convolution.filter_sizes = {256, 256, 1, 1};
  convolution.steps = {1, 1};
  convolution.padding = {0, 0};
  convolution.element_bytes = 2;
  CHECK(convolution_workspace(convolution, std::nullopt, true, 5000000) == 272);
  CHECK(convolution_workspace(convolution, std::nullopt, false, 5000000) == 5000000);
}

}  // namespace

TEST_MAIN()
