// The server's thread and its connections.
#include "sharing/server.hpp"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "base/forks.hpp"

namespace vram {

namespace {

// If accept fails, as it does without free descriptors, the server waits so long before it tries again.
constexpr int kPauseMs = 20;

Digits random_digits() {
  Digits digits{};
  while (getrandom(digits.data(), digits.size(), 0) != static_cast<ssize_t>(digits.size())) continue;
  for (char& digit : digits) digit = "0123456789abcdef"[static_cast<unsigned char>(digit) % 16];
  return digits;
}

void answer(int socket, const PageRequest& request, ShareServer::Export exporter, const Digits& secret,
            bool* keep) {
  std::vector<SharedPage> pages;
  PageAnswer reply;
  Status status;
  try {
    status = exporter(request, &pages);
  } catch (const std::bad_alloc&) {
    status = {Code::failed, ENOMEM, "export"};
  }
  reply.code = static_cast<std::uint32_t>(status.code);
  reply.native = status.native;
  reply.count = pages.size();
  reply.secret = secret;
  for (std::size_t i = 0; i < pages.size(); ++i) reply.bytes[i] = pages[i].bytes;
  *keep = send_answer(socket, reply, pages) == 0;
  for (const SharedPage& page : pages) ::close(page.fd);
}

class Server {
 public:
  Status start(ShareServer::Export exporter) {
    const std::lock_guard lock(mutex_);
    if (listener_ >= 0) return {};
    static std::once_flag once;
    std::call_once(once, [] { (void)pthread_atfork(nullptr, nullptr, close_inherited); });
    const int made = bind_server(identity);
    if (made < 0) return {Code::failed, errno, "bind"};
    listener_ = made;
    if (start_thread(exporter)) return {};
    ::close(listener_.exchange(-1));
    return {Code::failed, EAGAIN, "thread"};
  }
  const Digits identity = random_digits();
  const Secrets secrets{random_digits(), random_digits()};

 private:
  // In the child of a fork, which would otherwise keep connections of the parent open.
  static void close_inherited();

  // It receives no signals, which are for the program's own threads.
  bool start_thread(ShareServer::Export exporter) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = true;
    try {
      std::thread([this, exporter] { serve(exporter); }).detach();
    } catch (const std::system_error&) {
      started = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
  }

  [[noreturn]] void serve(ShareServer::Export exporter) {
    for (;;) {
      std::array<pollfd, 1 + ShareServer::kConnections> waits{};
      waits[0] = {listener_, POLLIN, 0};
      for (std::size_t i = 0; i < connections_.size(); ++i) waits[i + 1] = {connections_[i].fd, POLLIN, 0};
      if (poll(waits.data(), waits.size(), -1) < 0) continue;
      for (std::size_t i = 0; i < connections_.size(); ++i)
        if (waits[i + 1].revents != 0) hear(connections_[i], exporter);
      if (waits[0].revents != 0) accept_one();
    }
  }

  struct Connection {
    std::atomic<int> fd{-1};
    std::uint64_t heard = 0;  // the later, the larger
  };

  void hear(Connection& connection, ShareServer::Export exporter) {
    PageRequest request;
    const int error = receive_request(connection.fd, &request);
    if (error == EAGAIN || error == EINTR) return;
    bool keep = error == 0 && same(request.secret, secrets.asking);
    if (keep) answer(connection.fd, request, exporter, secrets.answering, &keep);
    connection.heard = ++clock_;
    if (!keep) ::close(connection.fd.exchange(-1));
  }

  void accept_one() {
    const int made = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (made < 0) {
      (void)poll(nullptr, 0, kPauseMs);
      return;
    }
    if (!same_user(made)) {
      ::close(made);
      return;
    }
    Connection* place = &connections_[0];
    for (Connection& each : connections_) {
      if (place->fd < 0) break;
      if (each.fd < 0 || each.heard < place->heard) place = &each;
    }
    const int old = place->fd.exchange(made);
    if (old >= 0) ::close(old);
    place->heard = ++clock_;
  }

  std::mutex mutex_;  // guards starting
  std::atomic<int> listener_{-1};
  std::array<Connection, ShareServer::kConnections> connections_;  // of the server's thread
  std::uint64_t clock_ = 0;
};

PerProcess<Server> server;

void Server::close_inherited() {
  Server* const parents = server.latest();
  if (parents == nullptr) return;
  if (const int fd = parents->listener_.exchange(-1); fd >= 0) ::close(fd);
  for (Connection& each : parents->connections_)
    if (const int fd = each.fd.exchange(-1); fd >= 0) ::close(fd);
}

}  // namespace

Status ShareServer::start(Export exporter) { return server.get().start(exporter); }

const Digits& ShareServer::identity() { return server.get().identity; }

const Secrets& ShareServer::secrets() { return server.get().secrets; }

}  // namespace vram
