// Asking the other process for pages, and mapping them.
#include "sharing/attachments.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "backends/ledger.hpp"
#include "sharing/server.hpp"
#include "sharing/wire.hpp"

namespace vram {

namespace {

// The server answers within milliseconds; a process that takes this long was stopped.
constexpr int kSeconds = 60;

bool fail(std::string* why, const std::string& text) {
  *why = text;
  return false;
}

std::string process_of(const SharedName& name) { return "process " + std::to_string(name.process); }

bool failed_call(std::string* why, const char* what, const Status& status) {
  return fail(why, std::string("failed to ") + what + ": " + status.call + " failed, code " +
                       std::to_string(status.native));
}

// Why no answer came.
bool unanswered(std::string* why, const SharedName& name, int error) {
  const std::string process = process_of(name);
  switch (error) {
    case ECONNREFUSED:
    case ECONNRESET:
    case EPIPE:
      return fail(why, process +
                           ", which shared this memory, has ended. It must keep running, and keep the "
                           "memory allocated, until others have attached it.");
    case EAGAIN:
    case ETIMEDOUT:
      return fail(why, process + ", which shared this memory, did not answer within " +
                           std::to_string(kSeconds) + " s. Check that it is not stopped.");
    case EMFILE:
      return fail(why,
                  "this process has no free file descriptors to receive shared memory with. Raise the "
                  "limit (ulimit -n).");
    case EPROTO:
      return fail(why, process +
                           " answered with an unknown message. Both processes must use the same "
                           "version of vram.");
    default:
      return fail(why, "failed to ask " + process + " for shared memory: " + std::strerror(error));
  }
}

bool refused(std::string* why, const SharedName& name, const PageAnswer& answer) {
  if (static_cast<Code>(answer.code) == Code::invalid)
    return fail(why, "the memory was freed by " + process_of(name) +
                         ", which shared it. Keep it allocated until others have attached it.");
  return fail(why, process_of(name) + " failed to export the memory, code " + std::to_string(answer.native));
}

// Descriptors of pages, closed at the end.
struct Received {
  ~Received() {
    for (const SharedPage& page : pages) ::close(page.fd);
  }
  std::vector<SharedPage> pages;
};

}  // namespace

bool Attachments::import_pages(const SharedName& name, Mapped& into, std::string* why) {
  const Socket socket(connect_server(name.identity, kSeconds));
  if (socket.fd() < 0) return unanswered(why, name, errno);
  if (!same_user(socket.fd())) return fail(why, process_of(name) + " belongs to another user");
  std::uint64_t bytes = 0;
  while (bytes < name.bytes) {
    const PageRequest request{PageRequest::kMagic, name.device,       name.address,
                              name.number,         into.pages.size(), name.secrets.asking};
    PageAnswer answer;
    Received received;
    if (const int error = send_request(socket.fd(), request); error != 0) return unanswered(why, name, error);
    if (const int error = receive_answer(socket.fd(), &answer, &received.pages); error != 0)
      return unanswered(why, name, error);
    if (!same(answer.secret, name.secrets.answering)) return unanswered(why, name, EPROTO);
    if (answer.code != 0) return refused(why, name, answer);
    for (const SharedPage& page : received.pages) {
      bytes += is_page_size(page.bytes) ? page.bytes : name.bytes + 1;
      if (bytes > name.bytes) break;
      PageHandle handle = 0;
      if (const Status status = into.device->page_import(page.fd, page.bytes, &handle); !status.ok())
        return failed_call(why, "import shared memory", status);
      into.pages.emplace_back(handle, page.bytes);
    }
    if (received.pages.empty() || bytes > name.bytes) return unanswered(why, name, EPROTO);
  }
  return true;
}

bool Attachments::map_pages(Mapped& into, std::string* why) {
  if (const Status status = into.device->space_reserve(into.bytes, &into.base); !status.ok())
    return failed_call(why, "reserve addresses for shared memory", status);
  for (const auto& [page, bytes] : into.pages) {
    if (const Status status = into.device->map(into.base + into.mapped, bytes, page); !status.ok())
      return failed_call(why, "map shared memory", status);
    into.mapped += bytes;
  }
  const Status status = into.device->set_access(into.base, into.bytes);
  return status.ok() || failed_call(why, "map shared memory", status);
}

// The driver does not open a name in the process that made it.
bool Attachments::open_plain(const SharedName& name, Mapped& into, std::string* why) {
  into.plain = true;
  into.own = name.identity == ShareServer::identity();
  if (into.own) {
    into.base = name.address;
    return true;
  }
  const Status status = into.device->plain_open(name.plain, &into.base);
  return status.ok() || failed_call(why, "open shared memory", status);
}

bool Attachments::open(const SharedName& name, Mapped& into, std::string* why) {
  into.bytes = name.bytes;
  if (name.number == 0) return open_plain(name, into, why);
  return import_pages(name, into, why) && map_pages(into, why);
}

// pre: nothing uses it. A failure leaves the rest to the end of the process.
void Attachments::close(Mapped& mapped) {
  Backend& device = *mapped.device;
  if (mapped.plain) {
    if (!mapped.own && mapped.base != 0) (void)device.plain_close(mapped.base);
    return;
  }
  std::uint64_t at = 0;
  bool unmapped = true;
  for (const auto& [page, bytes] : mapped.pages) {
    const bool here = at < mapped.mapped;
    const bool gone = !here || device.unmap(mapped.base + at, bytes).ok();
    if (gone) (void)device.page_release(page, bytes);
    unmapped = unmapped && gone;
    at += bytes;
  }
  if (mapped.base != 0 && unmapped) (void)device.space_release(mapped.base, mapped.bytes);
}

Address Attachments::attach(Backend& device, std::string_view text, std::string* why) {
  close_ended();
  SharedName name;
  if (!SharedName::parse(text, &name)) {
    fail(why, "the name of shared memory is not one of this version of vram");
    return 0;
  }
  const auto use_again = [&]() -> Address {
    for (auto& [address, mapped] : mapped_)
      if (mapped.device == &device && mapped.name == text) {
        ++mapped.uses;
        return address;
      }
    return 0;
  };
  {
    const std::lock_guard lock(mutex_);
    if (const Address found = use_again()) return found;
  }
  Mapped made;
  made.device = &device;
  made.name = text;
  if (!open(name, made, why)) {
    close(made);
    return 0;
  }
  Address found = 0;
  {
    const std::lock_guard lock(mutex_);
    found = use_again();  // another thread may have been faster
    if (found == 0) {
      const Address base = made.base;
      const auto [there, added] = mapped_.try_emplace(base, std::move(made));
      if (added) return base;
      // The driver opened the same plain memory under another name.
      ++there->second.uses;
      found = base;
    }
  }
  close(made);
  return found;
}

bool Attachments::detach(Address address) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = mapped_.find(address);
    if (found == mapped_.end()) return false;
    if (--found->second.uses != 0) return true;
    ended_.push_back(std::move(found->second));
    mapped_.erase(found);
  }
  close_ended();
  return true;
}

// Waits without the lock: each thread takes what has ended, and puts back what must wait longer.
void Attachments::close_ended() {
  std::vector<Mapped> ended;
  {
    const std::lock_guard lock(mutex_);
    ended.swap(ended_);
  }
  for (Mapped& each : ended) {
    if (each.device->synchronize().ok()) {
      close(each);
      continue;
    }
    const std::lock_guard lock(mutex_);
    ended_.push_back(std::move(each));
  }
}

std::size_t Attachments::count() const {
  const std::lock_guard lock(mutex_);
  return mapped_.size();
}

}  // namespace vram
