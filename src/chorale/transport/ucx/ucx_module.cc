// The side of transport/ucx/ucx.h that knows UCX.
#include <ucp/api/ucp.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "chorale/transport/ucx/ucx.h"

namespace {

using chorale::transport::Ucx;
using chorale::transport::UcxWorker;

void check(ucs_status_t status, const std::string& what) {
  if (status != UCS_OK) throw std::runtime_error("UCX says: " + what + ": " + ucs_status_string(status));
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value ? value : "";
}

// Whether there is nothing faster among these devices; if none is named, among those that UCX may use.
bool is_tcp_only(const std::string& named) {
  if (variable("UCX_TLS") == "tcp") return true;
  const std::string devices = named.empty() ? variable("UCX_NET_DEVICES") : named;
  const std::filesystem::path fast = "/sys/class/infiniband";
  std::error_code ignored;
  if (devices.empty() || devices == "all")
    return !std::filesystem::exists(fast, ignored) || std::filesystem::is_empty(fast, ignored);
  std::istringstream list(devices);
  for (std::string device; std::getline(list, device, ',');) {
    if (std::filesystem::exists(fast / device.substr(0, device.find(':')), ignored)) return false;
  }
  return true;
}

// More than a frame with the largest small message, and less than a segment of any transport.
constexpr const char* kMostAtOnce = "96k";

class Worker final : public UcxWorker {
 public:
  explicit Worker(const std::string& device) {
    ucp_config_t* config = nullptr;
    check(ucp_config_read(nullptr, nullptr, &config), "reading its variables");
    const auto set = [&](const char* name, const char* value) {
      const ucs_status_t status = ucp_config_modify(config, name, value);
      if (status == UCS_OK) return;
      ucp_config_release(config);
      check(status, std::string("setting ") + name + " to " + value);
    };
    if (!device.empty()) set("NET_DEVICES", device.c_str());
    if (!std::getenv("UCX_TLS")) set("TLS", "^sm");
    // Options of TCP; no other transport has these. Twice as fast for 64 MiB as the 8 KiB that UCX sends at a time.
    if (!std::getenv("UCX_TCP_TX_SEG_SIZE")) set("TX_SEG_SIZE", "512k");
    if (!std::getenv("UCX_TCP_RX_SEG_SIZE")) set("RX_SEG_SIZE", "512k");
    // What is longer waits for its receiver's word. Otherwise UCX sends it in several pieces, and a receive of which
    // some have come never ends when their sender is killed.
    set("RNDV_THRESH", kMostAtOnce);
    // Over TCP, UCX 1.13 counts a copy-free send that fails halfway twice, and ends the process for it: a rank that is
    // killed would take its peers along. With a copy it does not.
    if (is_tcp_only(device)) {
      set("PUT_ENABLE", "n");
      set("ZCOPY_THRESH", "inf");
    }
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
    params.features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP;
    params.name = "chorale";
    const ucs_status_t status = ucp_init(&params, config, &context_);
    ucp_config_release(config);
    check(status, device.empty() ? "no network device is there" : "no network device " + device);
    ucp_worker_params_t worker_params{};
    worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
    const ucs_status_t made = ucp_worker_create(context_, &worker_params, &worker_);
    if (made != UCS_OK) ucp_cleanup(context_);
    check(made, device.empty() ? "making a worker" : "making a worker for " + device);
  }
  ~Worker() override {
    while (!peers_.empty()) {
      Request request = disconnect(peers_.begin()->first);
      while (test(request) == Status::kPending) progress();
    }
    ucp_worker_destroy(worker_);
    ucp_cleanup(context_);
  }

  std::string address() override {
    ucp_address_t* address = nullptr;
    size_t bytes = 0;
    check(ucp_worker_get_address(worker_, &address, &bytes), "asking for the address");
    std::string text(reinterpret_cast<const char*>(address), bytes);
    ucp_worker_release_address(worker_, address);
    return text;
  }

  void connect(int rank, std::string_view address) override {
    Peer& peer = peers_[rank];
    peer.rank = rank;
    peer.worker = this;
    ucp_ep_params_t params{};
    params.field_mask =
        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.address = reinterpret_cast<const ucp_address_t*>(address.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.cb = [](void* argument, ucp_ep_h, ucs_status_t status) {
      const auto& broken = *static_cast<Peer*>(argument);
      broken.worker->broken_.emplace_back(broken.rank, ucs_status_string(status));
    };
    params.err_handler.arg = &peer;
    const ucs_status_t status = ucp_ep_create(worker_, &params, &peer.endpoint);
    if (status != UCS_OK) peers_.erase(rank);
    check(status, "no way to rank " + std::to_string(rank));
  }

  Request flush(int rank) override {
    const auto found = peers_.find(rank);
    if (found == peers_.end()) return nullptr;
    const ucp_request_param_t params{};
    const ucs_status_ptr_t request = ucp_ep_flush_nbx(found->second.endpoint, &params);
    return UCS_PTR_IS_PTR(request) ? request : nullptr;
  }

  // Never by UCX's own closing after a flush: a worker that goes while that is under way ends the process.
  Request disconnect(int rank) override {
    const auto found = peers_.find(rank);
    if (found == peers_.end()) return nullptr;
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    params.flags = UCP_EP_CLOSE_FLAG_FORCE;
    const ucs_status_ptr_t request = ucp_ep_close_nbx(found->second.endpoint, &params);
    // Kept, for the error handler may still be called.
    closed_.insert(peers_.extract(found));
    return UCS_PTR_IS_PTR(request) ? request : nullptr;
  }

  Request send(int peer, uint64_t tag, std::span<const std::byte> head, std::span<const std::byte> body) override {
    const auto found = peers_.find(peer);
    if (found == peers_.end()) throw std::runtime_error("there is no connection to rank " + std::to_string(peer));
    ucp_request_param_t params{};
    if (head.empty() || body.empty()) {
      const auto& whole = head.empty() ? body : head;
      return started(ucp_tag_send_nbx(found->second.endpoint, whole.data(), whole.size(), tag, &params));
    }
    // UCX keeps no copy of the list: it stays as long as the request.
    auto parts = std::make_unique<Parts>();
    parts->list[0] = {const_cast<std::byte*>(head.data()), head.size()};
    parts->list[1] = {const_cast<std::byte*>(body.data()), body.size()};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_DATATYPE;
    params.datatype = ucp_dt_make_iov();
    const Request request = started(ucp_tag_send_nbx(found->second.endpoint, parts->list, 2, tag, &params));
    if (request) parts_.emplace(request, std::move(parts));
    return request;
  }

  Request receive(uint64_t tag, std::span<std::byte> into) override {
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    return started(ucp_tag_recv_nbx(worker_, into.data(), into.size(), tag, ~uint64_t{0}, &params));
  }

  std::optional<Found> find(uint64_t tag, uint64_t mask) override {
    ucp_tag_recv_info_t info;
    const ucp_tag_message_h message = ucp_tag_probe_nb(worker_, tag, mask, 1, &info);
    if (!message) return std::nullopt;
    return Found{message, info.sender_tag, info.length};
  }
  Request receive_found(const Found& found, std::span<std::byte> into) override {
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    return started(ucp_tag_msg_recv_nbx(worker_, into.data(), into.size(),
                                        static_cast<ucp_tag_message_h>(found.message), &params));
  }

  Status test(Request& request) override {
    if (!request) return Status::kDone;
    const ucs_status_t status = ucp_request_check_status(request);
    if (status == UCS_INPROGRESS) return Status::kPending;
    parts_.erase(request);
    ucp_request_free(request);
    request = nullptr;
    return status == UCS_OK ? Status::kDone : Status::kFailed;
  }
  void cancel(Request request) override {
    if (request) ucp_request_cancel(worker_, request);
  }

  bool progress() override { return ucp_worker_progress(worker_) != 0; }
  int descriptor() override {
    int descriptor = -1;
    check(ucp_worker_get_efd(worker_, &descriptor), "its devices cannot wake a waiting thread");
    return descriptor;
  }
  bool arm() override {
    const ucs_status_t status = ucp_worker_arm(worker_);
    if (status == UCS_ERR_BUSY) return false;
    check(status, "arming the worker");
    return true;
  }
  std::vector<std::pair<int, std::string>> take_broken() override { return std::exchange(broken_, {}); }

 private:
  struct Peer {
    int rank = -1;
    Worker* worker = nullptr;
    ucp_ep_h endpoint = nullptr;
  };
  struct Parts {
    ucp_dt_iov_t list[2];
  };

  static Request started(ucs_status_ptr_t request) {
    if (UCS_PTR_IS_ERR(request)) check(UCS_PTR_STATUS(request), "starting a message");
    return request;
  }

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  std::map<int, Peer> peers_, closed_;
  std::map<Request, std::unique_ptr<Parts>> parts_;
  std::vector<std::pair<int, std::string>> broken_;
};

class UcxModule final : public Ucx {
 public:
  std::unique_ptr<UcxWorker> make_worker(const std::string& device) override {
    return std::make_unique<Worker>(device);
  }
};

}  // namespace

extern "C" void* chorale_ucx_module_1() {
  static UcxModule module;
  return static_cast<Ucx*>(&module);
}
