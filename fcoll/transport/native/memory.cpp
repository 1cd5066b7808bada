#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U
#endif

namespace fcoll {

namespace {

constexpr uint64_t MAGIC = 0x66636f6c6c303032;
constexpr char NAME[] = "fcoll";

// The first page of every memory.
struct Header {
  uint64_t magic, token, bytes;
  Status status;
};
static_assert(sizeof(Header) <= SharedFile::PAGE);

// A page that a peer could cut off would be a SIGBUS here.
constexpr int SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Sealed against being run as a program, too, where the kernel can (Linux 6.3).
int make_memfd() {
  constexpr unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  int fd = memfd_create(NAME, flags | MFD_NOEXEC_SEAL);
  return fd < 0 && errno == EINVAL ? memfd_create(NAME, flags) : fd;
}

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error("fcoll: shared memory: " + what);
}

[[noreturn]] void fail(const std::string& what, int error) {
  fail(what + ": " + std::strerror(error));
}

}  // namespace

// -- status ---------------------------------------------------------------------------------------

void Status::fail(const Error& e) {
  error_kind = e.kind;
  error_rank = e.rank;
  std::strncpy(error, e.what(), sizeof error - 1);
  state.store(State::failed, std::memory_order_release);
}

std::optional<Error> Status::failure() const {
  if (state.load(std::memory_order_acquire) != State::failed) return std::nullopt;
  return Error(Error::What(error_kind), error_rank, error);
}

// -- files ----------------------------------------------------------------------------------------

SharedFile::SharedFile(size_t bytes, Pages pages) : bytes_(bytes) {
  std::string wish = "cannot allocate " + std::to_string(bytes) + " bytes";
  if (bytes > size_t(INT64_MAX) - 2 * PAGE) fail(wish);
  if (getrandom(&token_, sizeof token_, 0) != sizeof token_) fail("getrandom", errno);
  fd_ = make_memfd();
  if (fd_ < 0) fail(wish, errno);
  Header h{MAGIC, token_, bytes, {}};
  h.status.cpus = own_cpus();
  h.status.presence = own_presence();
  if (ftruncate(fd_, whole()) != 0 || (pages != Pages::as_used && fallocate(fd_, 0, 0, whole()) != 0) ||
      pwrite(fd_, &h, sizeof h, 0) != sizeof h || fcntl(fd_, F_ADD_SEALS, SEALS) != 0) {
    int why = errno;
    close();
    fail(wish, why);
  }
}

SharedFile::SharedFile(const Address& at) : bytes_(at.bytes), token_(at.token) {
  std::string path = "/proc/" + std::to_string(at.pid) + "/fd/" + std::to_string(at.fd);
  std::string other = path + " is not the peer's memory: is it in another container or host?";
  // Not opened blindly: in another container it may be anybody's, and opening some has effects.
  char target[64] = {};
  if (readlink(path.c_str(), target, sizeof target - 1) < 0) fail("cannot read " + path, errno);
  if (std::string(target).rfind(std::string("/memfd:") + NAME, 0) != 0) fail(other);
  fd_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd_ < 0) fail("cannot open " + path, errno);
  struct stat about;
  uint64_t found[3] = {};  // of the header: what a Header begins with
  bool right = fstat(fd_, &about) == 0 && size_t(about.st_size) == whole() &&
               (fcntl(fd_, F_GET_SEALS) & SEALS) == SEALS &&
               pread(fd_, found, sizeof found, 0) == sizeof found && found[0] == MAGIC &&
               found[1] == at.token && found[2] == at.bytes;
  if (right) return;
  close();
  fail(other);
}

// Never without a page of data: an empty tensor needs an address that is no other's.
size_t SharedFile::whole() const { return PAGE + round_up(std::max<size_t>(bytes_, 1), PAGE); }

Address SharedFile::address() const { return {getpid(), fd_, token_, bytes_}; }

bool SharedFile::reserve(size_t at, size_t length) const {
  return fallocate(fd_, 0, PAGE + at, length) == 0;
}

uint8_t* SharedFile::map(size_t at, size_t length) const {
  void* made = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, PAGE + at);
  return made == MAP_FAILED ? nullptr : static_cast<uint8_t*>(made);
}

uint8_t* SharedFile::map_whole(Pages pages) const {
  int flags = MAP_SHARED | (pages == Pages::mapped ? MAP_POPULATE : 0);
  void* made = mmap(nullptr, whole(), PROT_READ | PROT_WRITE, flags, fd_, 0);
  return made == MAP_FAILED ? nullptr : static_cast<uint8_t*>(made);
}

bool SharedFile::read(size_t at, void* to, size_t bytes) const {
  for (size_t have = 0; have < bytes;) {
    ssize_t got = pread(fd_, static_cast<uint8_t*>(to) + have, bytes - have, PAGE + at + have);
    if (got <= 0) return false;
    have += got;
  }
  return true;
}

bool SharedFile::write(size_t at, const void* from, size_t bytes) const {
  for (size_t put = 0; put < bytes;) {
    auto rest = static_cast<const uint8_t*>(from) + put;
    ssize_t got = pwrite(fd_, rest, bytes - put, PAGE + at + put);
    if (got <= 0) return false;
    put += got;
  }
  return true;
}

void SharedFile::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

// -- whole memories -------------------------------------------------------------------------------

namespace {

// Of this process, by token. Never freed: memory may be let go of while the process exits.
struct OwnMemories {
  std::mutex mutex;
  std::unordered_map<uint64_t, std::weak_ptr<Memory>> by_token;
  OwnMemories() { hold_over_forks(mutex); }
};

OwnMemories& own() {
  static auto& made = *new OwnMemories;
  return made;
}

}  // namespace

namespace {

uint8_t* mapped(const SharedFile& file, Pages pages) {
  if (uint8_t* made = file.map_whole(pages)) return made;
  fail("cannot map " + std::to_string(file.bytes()) + " bytes", errno);
}

}  // namespace

Memory::Memory(size_t bytes, Pages pages) : file_(bytes, pages), base_(mapped(file_, pages)) {}
Memory::Memory(const Address& at, Pages pages) : file_(at), base_(mapped(file_, pages)) {}

Memory::~Memory() { munmap(base_, file_.whole()); }

Status& Memory::status() const { return reinterpret_cast<Header*>(base_)->status; }

std::shared_ptr<Memory> Memory::make(size_t bytes, Pages pages) {
  std::shared_ptr<Memory> made(new Memory(bytes, pages));
  std::lock_guard lock(own().mutex);
  std::erase_if(own().by_token, [](const auto& entry) { return entry.second.expired(); });
  own().by_token[made->address().token] = made;
  return made;
}

std::shared_ptr<Memory> Memory::open(const Address& at, Pages pages) {
  if (at.pid == getpid()) {
    std::lock_guard lock(own().mutex);
    auto found = own().by_token.find(at.token);
    if (found != own().by_token.end())
      if (auto memory = found->second.lock()) return memory;
  }
  std::shared_ptr<Memory> made(new Memory(at, pages));
  made->close_fd();  // the mapping is enough
  return made;
}

}  // namespace fcoll
