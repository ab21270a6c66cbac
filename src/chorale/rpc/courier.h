// Inside rpc: carries what distributed autograd sends.
#pragma once

#include "chorale/dist_autograd/contexts.h"
#include "chorale/rpc/message.h"

namespace chorale::rpc {

class Core;

class RpcCourier final : public dist_autograd::Courier {
 public:
  explicit RpcCourier(Core& core) : core_(core) {}
  void send(int to, dist_autograd::Gradients gradients, Done done) override;
  void send(int to, dist_autograd::Marks marks, Marked done) override;
  void send(int to, dist_autograd::Notice notice) override;
  std::unique_ptr<dist_autograd::Latch> make_latch() override;

  // What comes.
  void serve(int from, Message request);

 private:
  Core& core_;
};

}  // namespace chorale::rpc
