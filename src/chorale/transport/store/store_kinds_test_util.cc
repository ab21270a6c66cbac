#include "chorale/transport/store/store_kinds_test_util.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/transport/store/file_store.h"
#include "chorale/transport/store/memory_store.h"
#include "chorale/transport/store/prefix_store.h"
#include "chorale/transport/store/store_server.h"
#include "chorale/transport/store/tcp_store.h"

namespace chorale::transport {
namespace {

class SharedStore final : public StoreFixture {
 public:
  explicit SharedStore(std::shared_ptr<Store> store) : store_(std::move(store)) {}
  std::shared_ptr<Store> client() override { return store_; }

 private:
  const std::shared_ptr<Store> store_;
};

class FileFixture final : public StoreFixture {
 public:
  std::shared_ptr<Store> client() override { return std::make_shared<FileStore>(folder_.path("store")); }

 private:
  ScratchFolder folder_;
};

class ServerFixture final : public StoreFixture {
 public:
  ServerFixture(const Endpoint& endpoint, std::optional<Secret> secret)
      : secret_(std::move(secret)), server_(endpoint, secret_) {}
  std::shared_ptr<Store> client() override {
    return std::make_shared<TcpStore>(server_.endpoint(), secret_, within(std::chrono::seconds(10)));
  }

 private:
  const std::optional<Secret> secret_;
  StoreServer server_;
};

// A neighbour with the same keys must not be seen.
std::shared_ptr<Store> prefix_view() {
  auto whole = std::make_shared<MemoryStore>();
  for (const char* key : {"a", "view", "viewa", "view2/a"}) whole->set(key, "not yours", Deadline::never());
  return std::make_shared<PrefixStore>("view", whole);
}

}  // namespace

ScratchFolder::ScratchFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "chorale_test_XXXXXX").string();
  CHORALE_INVARIANT(mkdtemp(name.data()), "no scratch folder");
  folder_ = name;
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

Endpoint scratch_unix_endpoint() {
  static std::atomic<int> number = 0;
  return Endpoint::unix_socket(concat("chorale_test_", getpid(), "_", number++));
}

const std::vector<StoreKind>& store_kinds() {
  static const std::vector<StoreKind> kinds{
      {"memory", [] { return std::make_unique<SharedStore>(std::make_shared<MemoryStore>()); }},
      {"prefix", [] { return std::make_unique<SharedStore>(prefix_view()); }},
      {"file", [] { return std::make_unique<FileFixture>(); }},
      {"tcp", [] { return std::make_unique<ServerFixture>(Endpoint::tcp("127.0.0.1", 0), Secret::generate()); }},
      {"unix", [] { return std::make_unique<ServerFixture>(scratch_unix_endpoint(), std::nullopt); }},
  };
  return kinds;
}

}  // namespace chorale::transport
