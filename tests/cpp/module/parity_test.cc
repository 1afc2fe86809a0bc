// Whole models, trained three AdamW steps: every loss, gradient and parameter equals the unsharded run's.
#include "nets.h"

namespace fsdp::testing {
namespace {

using namespace torch::nn;

struct ParityThreads : OnRanks {};

TEST_P(ParityThreads, Mlp) { expect_parity(ranks(), mlp({8, 17, 5}, 2 * ranks())); }

TEST_P(ParityThreads, MlpInFloat) {
  auto c = mlp({8, 17, 5}, 2 * ranks());
  c.dtype = at::kFloat;
  c.tolerance = 2e-5;
  expect_parity(ranks(), c);
}

TEST_P(ParityThreads, WideMlp) { expect_parity(ranks(), wide_mlp(2 * ranks())); }

TEST_P(ParityThreads, Gpt) { expect_parity(ranks(), gpt_case(2 * ranks(), /*tied=*/false)); }

TEST_P(ParityThreads, GptWithTiedEmbedding) { expect_parity(ranks(), gpt_case(ranks(), /*tied=*/true)); }

TEST_P(ParityThreads, ConvAndBatchNorm) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        net.add("conv", Conv2d(Conv2dOptions(3, 7, 3).padding(1).bias(false)));
        net.add("norm", BatchNorm2d(7));
        net.add("head", Linear(7, 4));
      },
      [](FunctionNet& net, const at::Tensor& x) {
        auto y = at::relu(net.module<BatchNorm2dImpl>("norm").forward(net.module<Conv2dImpl>("conv").forward(x)));
        return net.module<LinearImpl>("head").forward(y.mean({2, 3}));
      });
  c.batch = ramp({4, 3, 6, 6});
  c.same_data = true;
  expect_parity(ranks(), c);
  c.dtype = at::kFloat;  // other kernels
  c.tolerance = 2e-4;    // batch norm takes small differences of large sums
  expect_parity(ranks(), c);
}

Case recurrent(bool gru, int64_t samples) {
  Case c;
  c.make = function_net(
      [gru](FunctionNet& net) {
        if (gru) {
          net.add("rnn", GRU(GRUOptions(5, 7).num_layers(2).bidirectional(true).batch_first(true)));
        } else {
          net.add("rnn", LSTM(LSTMOptions(5, 7).num_layers(2).batch_first(true)));
        }
        net.add("head", Linear(gru ? 14 : 7, 3));
      },
      [gru](FunctionNet& net, const at::Tensor& x) {
        const auto y = gru ? std::get<0>(net.module<GRUImpl>("rnn").forward(x))
                           : std::get<0>(net.module<LSTMImpl>("rnn").forward(x));
        return net.module<LinearImpl>("head").forward(y);
      });
  c.batch = ramp({samples, 4, 5});
  return c;
}

TEST_P(ParityThreads, Lstm) {
  auto c = recurrent(/*gru=*/false, 2 * ranks());
  expect_parity(ranks(), c);
  c.dtype = at::kFloat;
  c.tolerance = 5e-5;
  expect_parity(ranks(), c);
}

TEST_P(ParityThreads, GruBidirectional) {
  auto c = recurrent(/*gru=*/true, 2 * ranks());
  expect_parity(ranks(), c);
}

TEST_P(ParityThreads, MultiheadAttention) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        net.add("attention", MultiheadAttention(MultiheadAttentionOptions(8, 2)));
        net.add("cross", MultiheadAttention(MultiheadAttentionOptions(8, 2).kdim(8).vdim(8).add_bias_kv(true)));
        net.add("head", Linear(8, 3));
      },
      [](FunctionNet& net, const at::Tensor& x) {
        const auto t = x.transpose(0, 1);  // time first
        const auto y = std::get<0>(net.module<MultiheadAttentionImpl>("attention").forward(t, t, t));
        const auto z = std::get<0>(net.module<MultiheadAttentionImpl>("cross").forward(y, t, t));
        return net.module<LinearImpl>("head").forward(z).transpose(0, 1);
      });
  c.batch = ramp({2 * ranks(), 5, 8});
  expect_parity(ranks(), c);
}

TEST_P(ParityThreads, TransformerEncoder) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        const auto layer = TransformerEncoderLayerOptions(8, 2).dim_feedforward(12).dropout(0.0);
        net.add("encoder", torch::nn::TransformerEncoder(TransformerEncoderOptions(TransformerEncoderLayer(layer), 2)));
        net.add("head", Linear(8, 3));
      },
      [](FunctionNet& net, const at::Tensor& x) {
        const auto y = net.module<TransformerEncoderImpl>("encoder").forward(x.transpose(0, 1));
        return net.module<LinearImpl>("head").forward(y).transpose(0, 1);
      });
  c.batch = ramp({2 * ranks(), 5, 8});
  expect_parity(ranks(), c);
}

TEST_P(ParityThreads, EmbeddingsAndBilinear) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        net.add("words", Embedding(11, 6));
        net.add("bag", EmbeddingBag(EmbeddingBagOptions(11, 6).mode(torch::kSum)));
        net.add("pair", Bilinear(6, 6, 4));
      },
      [](FunctionNet& net, const at::Tensor& x) {
        const auto words = net.module<EmbeddingImpl>("words").forward(x).mean(1);
        return net.module<BilinearImpl>("pair").forward(words, net.module<EmbeddingBagImpl>("bag").forward(x));
      });
  c.batch = ramp({2 * ranks(), 5}).add(1).mul(5.4).to(at::kLong);
  expect_parity(ranks(), c);
}

FSDP_ON_RANKS(ParityThreads, 1, 2, 3, 5);

}  // namespace
}  // namespace fsdp::testing
