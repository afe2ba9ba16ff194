// Sending and receiving messages with descriptors.
#include "sharing/wire.hpp"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

namespace vram {

namespace {

constexpr int kWaiting = 16;  // connections that the server has not accepted yet

// In the abstract namespace: it ends with the socket and leaves no file.
sockaddr_un address_of(const Digits& identity, socklen_t* length) {
  const std::string name = "vram-" + std::string(identity.begin(), identity.end());
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

int failed(int socket) {
  const int error = errno;
  ::close(socket);
  errno = error;
  return -1;
}

union Control {
  char bytes[CMSG_SPACE(sizeof(int) * kPagesAtATime)];
  cmsghdr aligned;
};

// A message of another size is an error: this is not our protocol.
int result_of(ssize_t moved, std::size_t wanted) {
  if (moved < 0) return errno;
  if (moved == 0) return ECONNRESET;
  return static_cast<std::size_t>(moved) == wanted ? 0 : EPROTO;
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this == &other) return *this;
  if (fd_ >= 0) ::close(fd_);
  fd_ = other.release();
  return *this;
}

Socket::~Socket() {
  if (fd_ >= 0) ::close(fd_);
}

int Socket::release() { return std::exchange(fd_, -1); }

int bind_server(const Digits& identity) {
  const int made = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (made < 0) return -1;
  socklen_t length = 0;
  const sockaddr_un address = address_of(identity, &length);
  if (bind(made, reinterpret_cast<const sockaddr*>(&address), length) != 0) return failed(made);
  return listen(made, kWaiting) == 0 ? made : failed(made);
}

int connect_server(const Digits& identity, int seconds) {
  const int made = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (made < 0) return -1;
  const timeval limit{seconds, 0};
  (void)setsockopt(made, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  (void)setsockopt(made, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  socklen_t length = 0;
  const sockaddr_un address = address_of(identity, &length);
  int result = 0;
  do {
    result = connect(made, reinterpret_cast<const sockaddr*>(&address), length);
  } while (result != 0 && errno == EINTR);
  return result == 0 ? made : failed(made);
}

bool same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

bool same(const Digits& one, const Digits& other) {
  int different = 0;
  for (std::size_t i = 0; i < one.size(); ++i) different |= one[i] ^ other[i];
  return different == 0;
}

int send_request(int socket, const PageRequest& request) {
  ssize_t sent = 0;
  do {
    sent = send(socket, &request, sizeof request, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return result_of(sent, sizeof request);
}

// Descriptors that come with it find no room, and the system closes them. A longer message ends here too.
int receive_request(int socket, PageRequest* request) {
  const ssize_t received = recv(socket, request, sizeof *request, MSG_DONTWAIT | MSG_TRUNC);
  if (const int error = result_of(received, sizeof *request); error != 0) return error;
  return request->magic == PageRequest::kMagic ? 0 : EPROTO;
}

int send_answer(int socket, const PageAnswer& answer, const std::vector<SharedPage>& pages) {
  Control control{};
  iovec data{const_cast<PageAnswer*>(&answer), sizeof answer};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (!pages.empty()) {
    message.msg_control = control.bytes;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * pages.size());
    cmsghdr* const head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int) * pages.size());
    for (std::size_t i = 0; i < pages.size(); ++i)
      std::memcpy(CMSG_DATA(head) + i * sizeof(int), &pages[i].fd, sizeof(int));
  }
  return result_of(sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL), sizeof answer);
}

int receive_answer(int socket, PageAnswer* answer, std::vector<SharedPage>* pages) {
  pages->clear();
  pages->reserve(kPagesAtATime);
  Control control{};
  iovec data{answer, sizeof *answer};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof control.bytes;
  ssize_t received = 0;
  do {
    received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  if (received < 0) return errno;
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      SharedPage page;
      std::memcpy(&page.fd, CMSG_DATA(head) + i * sizeof(int), sizeof(int));
      pages->push_back(page);
    }
  }
  if (const int error = result_of(received, sizeof *answer); error != 0) return error;
  // MSG_CTRUNC: this process has no room for more descriptors.
  if ((message.msg_flags & MSG_CTRUNC) != 0) return EMFILE;
  if (answer->magic != PageAnswer::kMagic || (message.msg_flags & MSG_TRUNC) != 0 ||
      answer->count != pages->size())
    return EPROTO;
  for (std::size_t i = 0; i < pages->size(); ++i) (*pages)[i].bytes = answer->bytes[i];
  return 0;
}

}  // namespace vram
