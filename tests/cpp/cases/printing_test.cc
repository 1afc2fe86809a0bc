// Row 23: one rank alone looks at a sharded parameter. No rank waits for another, and nothing wrong is shown.
#include <sstream>

#include "cases.h"

namespace fsdp::testing {
namespace {

template <class T>
std::string printed(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

template <class T>
void expect_contains(const T& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
}

// What rank 0 does alone must not need rank 1, which waits for it in the barrier at the end.
void alone_on_rank_0(const std::function<void(Stack&, FSDPModule<Stack>&)>& body) {
  const auto begin = std::chrono::steady_clock::now();
  run_ranks(2, [&](int rank) {
    Stack net(2, 5);
    auto model = shard_blocks(net, {});
    model(at::ones({2, 5})).sum().backward();
    if (rank == 0) body(net, model);
    barrier();
    model(at::ones({2, 5})).sum().backward();
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

TEST(PrintingThreads, Row23OneRankPrintsADTensor) {
  alone_on_rank_0([](Stack& net, auto&) {
    const auto& weight = net->blocks->ptr<torch::nn::LinearImpl>(0)->weight;
    const auto text = printed(dtensor(weight));
    expect_contains(text, {"'blocks.0.weight'", "[5, 5]", "Shard(0)", "dp=2", "[ CPUFloatType{3,5} ]"});
    expect_contains(text, {printed(dtensor(weight).to_local().detach())});
    expect_contains(printed(dtensor(weight.grad())), {"'blocks.0.weight'", "[5, 5]"});
  });
}

TEST(PrintingThreads, Row23TorchsOwnPrintSaysWhatToCall) {
  alone_on_rank_0([](Stack& net, auto&) {
    const auto& weight = net->head->weight;
    for (const bool grad_mode : {true, false}) {
      at::AutoGradMode mode(grad_mode);
      for (const auto& tensor : {weight, weight.grad(), weight.detach()}) {
        expect_contains(error_of([&] { printed(tensor); }), {"libfsdp", "'head.weight'", "dtensor", "operator<<"});
      }
    }
  });
}

TEST(PrintingThreads, Row23OtherLooksOfOneRank) {
  alone_on_rank_0([](Stack& net, auto& model) {
    const auto& weight = net->head->weight;
    EXPECT_EQ(weight.sizes(), (std::vector<int64_t>{2, 5}));
    EXPECT_EQ(weight.toString(), "CPUFloatType");
    printed(*net);  // the module's structure
    printed(model.schedule());
    // Reading bytes behind torch's back is refused rather than answered with a shard's or nothing's.
    for (const bool grad_mode : {true, false}) {
      at::AutoGradMode mode(grad_mode);
      for (const auto& read : std::vector<std::function<void()>>{
               [&] { weight.data_ptr<float>(); }, [&] { weight.const_data_ptr(); }, [&] { weight.storage(); },
               [&] { weight.accessor<float, 2>(); }, [&] { weight.grad().data_ptr<float>(); },
               [&] { weight[0][0].item<float>(); }, [&] { net->head->bias.grad()[0].item(); }}) {
        expect_contains(error_of(read), {"'head.", "full_tensor()"});
      }
    }
  });
}

}  // namespace
}  // namespace fsdp::testing
