// The messages between a process that shares memory and one that attaches it, over a Unix socket that keeps
// messages apart. Defines PageRequest and PageAnswer, and how they are sent with file descriptors. A request
// asks for a few pages, so few descriptors are open at any time, however long the allocation is.
#pragma once

#include <array>
#include <vector>

#include "pool/shares.hpp"

namespace vram {

inline constexpr std::size_t kPagesAtATime = 16;

// 128 random bits, as hexadecimal digits.
using Digits = std::array<char, 32>;

// Every request carries the first and every answer the second. The address of a server can be read by others
// (/proc/net/unix), and processes of other containers may count as the same user. These two are in the names
// of shared memory alone, so only processes that were given a name get pages, and nobody else can answer.
struct Secrets {
  Digits asking{};
  Digits answering{};
};

struct PageRequest {
  static constexpr std::uint64_t kMagic = 0x7672616d2d61736b;
  std::uint64_t magic = kMagic;
  std::int64_t device = 0;
  std::uint64_t address = 0;  // these two as in SharedName
  std::uint64_t number = 0;
  std::uint64_t first = 0;  // the first page that is asked for
  Digits secret{};          // Secrets::asking
};

// The descriptors of the pages come with it.
struct PageAnswer {
  static constexpr std::uint64_t kMagic = 0x7672616d2d736179;
  std::uint64_t magic = kMagic;
  std::uint32_t code = 0;  // Code; invalid: the allocation does not exist anymore
  std::int32_t native = 0;
  std::uint64_t count = 0;
  std::uint64_t bytes[kPagesAtATime] = {};
  Digits secret{};  // Secrets::answering
};

// A socket that is closed at the end.
class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();
  int fd() const { return fd_; }
  int release();

 private:
  int fd_;
};

// Of the server of the process with this identity. -1 with errno set on failure.
int bind_server(const Digits& identity);
// The same; within `seconds`, here and in later calls on the socket.
int connect_server(const Digits& identity, int seconds);
// Whether the other end belongs to this process's user.
bool same_user(int socket);
// Takes as long wherever they differ.
bool same(const Digits& one, const Digits& other);

// These return 0 or an error number. Answers are sent without waiting.
int send_request(int socket, const PageRequest& request);
int receive_request(int socket, PageRequest* request);
int send_answer(int socket, const PageAnswer& answer, const std::vector<SharedPage>& pages);
// The caller closes the descriptors, also on failure.
int receive_answer(int socket, PageAnswer* answer, std::vector<SharedPage>* pages);

}  // namespace vram
