// Every kind of store, for tests that hold for all of them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chorale/transport/socket.h"
#include "chorale/transport/store/store.h"

namespace chorale::transport {

// One shared dictionary: each client sees what the others do.
class StoreFixture {
 public:
  virtual ~StoreFixture() = default;
  virtual std::shared_ptr<Store> client() = 0;
};

struct StoreKind {
  std::string name;
  std::function<std::unique_ptr<StoreFixture>()> make;
};
const std::vector<StoreKind>& store_kinds();

// A name that nobody else uses.
Endpoint scratch_unix_endpoint();

// A new empty folder that goes away with the object.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  std::string path(const std::string& name) const { return folder_ + "/" + name; }

 private:
  std::string folder_;
};

}  // namespace chorale::transport
