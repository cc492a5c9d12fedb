// As span_mma, with Hopper's warpgroup products (compute capability 9.0, head size 64 or 128): a block has WARPGROUPS
// warpgroups of 64 folded query rows and reads tiles of 128 keys. The scores of tile t are computed while the values of tile
// t - 1 are summed, and the softmax of tile t runs under that second product.

namespace shared_attention {

constexpr int WGMMA_KEYS = 128;

#define REGISTERS_32                                                                                           \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28," \
  "%29,%30,%31"
#define REGISTERS_64                                                                                           \
  REGISTERS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54," \
               "%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define OPERANDS_8(d, i)                                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define OPERANDS_32(d, i) OPERANDS_8(d, i), OPERANDS_8(d, i + 8), OPERANDS_8(d, i + 16), OPERANDS_8(d, i + 24)
#define WGMMA(n) "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." ELEMENT "." ELEMENT " "

// scores (64 x 128) = or += queries @ keys^T, both from shared memory.
DEVICE void multiply_queries(float (&d)[64], unsigned long long a, unsigned long long b, int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n" WGMMA("128") "{" REGISTERS_64 "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
               : OPERANDS_32(d, 0), OPERANDS_32(d, 32) : "l"(a), "l"(b), "r"(accumulate));
}
// accumulator (64 x head size) += weights (registers) @ values (shared memory).
DEVICE void multiply_weights(float (&d)[64], const unsigned (&a)[4], unsigned long long b) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n" WGMMA("128") "{" REGISTERS_64 "}, {%64,%65,%66,%67}, %68, p, 1, 1, 1;\n}\n"
               : OPERANDS_32(d, 0), OPERANDS_32(d, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
DEVICE void multiply_weights(float (&d)[32], const unsigned (&a)[4], unsigned long long b) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n" WGMMA("64") "{" REGISTERS_32 "}, {%32,%33,%34,%35}, %36, p, 1, 1, 1;\n}\n"
               : OPERANDS_32(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
DEVICE void start_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
// Makes copied tiles visible to the tensor cores, which read shared memory through another path.
DEVICE void publish_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Keeps the compiler from moving reads of products above the wait for them.
template <int SIZE> DEVICE void products_are_ready(float (&d)[SIZE]) {
#pragma unroll
  for (int i = 0; i < SIZE; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// Describes a tile to wgmma: address, distance of panels, distance of 8-row blocks (16-byte units), 128-byte swizzle.
DEVICE unsigned long long describe_tile(unsigned address, unsigned panel_distance) {
  return (unsigned long long)((address & 0x3ffff) >> 4) | ((unsigned long long)(panel_distance >> 4) << 16) |
         ((unsigned long long)(8 * PANEL_ROW >> 4) << 32) | (1ull << 62);
}

// Starts the copy of a block's query rows; rows beyond the group's become zeros.
template <int D, int R, int ROWS, int THREADS>
DEVICE void copy_queries(unsigned tile, const Element* queries, long long row_stride, long long head_stride, const Work& work,
                         const Member* members, int head_base) {
  using Shape = CopyShape<D, THREADS>;
  const int lane_row = threadIdx.x / Shape::LANES, chunk = threadIdx.x % Shape::LANES;
#pragma unroll
  for (int i = 0; i < ROWS / Shape::STRIDE; i++) {
    const int row = lane_row + i * Shape::STRIDE, folded = work.folded_begin + row;
    const bool valid = folded < work.folded_end;
    const int safe = valid ? folded : work.folded_begin;
    const Element* from = queries + members[work.first_member + safe / R].row * row_stride +
                          (head_base + safe % R) * head_stride + chunk * 8;
    copy_16(tile + chunk_offset<ROWS>(row, chunk), from, valid);
  }
}

template <int D, int R, int WARPGROUPS, int STAGES, bool WINDOW>
DEVICE void span_wgmma(const Element* queries, long long query_row, long long query_head, const Segment& segment, const Work& work,
                       const Member* members, const int* lengths, float softmax_scale, float* out, float* log_sum,
                       unsigned char* buffer) {
  constexpr int KEYS = WGMMA_KEYS, THREADS = WARPGROUPS * 128, ROWS = WARPGROUPS * 64;
  constexpr int TILE = tile_bytes(KEYS, D), KEY_STEPS = KEYS / 16;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warpgroup = warp >> 2;
  const int head = blockIdx.y, head_base = head * R, folded = work.folded_begin + warp * 16;
  const float scale = softmax_scale * LOG2_E;
  const Element* keys = segment.keys + work.slot * segment.key_slot + head * segment.key_head;
  const Element* values = segment.values + work.slot * segment.value_slot + head * segment.value_head;
  const int tiles = (work.key_end - work.key_begin + KEYS - 1) / KEYS;
  const unsigned query_tile = shared_address(buffer);
  const unsigned key_ring = query_tile + tile_bytes(ROWS, D), value_ring = key_ring + STAGES * TILE;

  auto copy = [&](const Element* source, long long stride, unsigned ring, int tile, int slot) {
    if (tile < tiles)
      copy_tile<D, KEYS, THREADS>(ring + slot * TILE, source, stride, work.key_begin + tile * KEYS, work.key_end, threadIdx.x);
  };
  float accumulator[D / 2], scores[KEYS / 2], shrink[2];
  unsigned weights[KEY_STEPS][4];
  const unsigned long long query_view = describe_tile(query_tile + warpgroup * 64 * PANEL_ROW, 16);
  const unsigned long long key_view = describe_tile(key_ring, 16), value_view = describe_tile(value_ring, KEYS * PANEL_ROW);
  auto start_scores = [&](int slot) {
    start_products();
#pragma unroll
    for (int step = 0; step < D / 16; step++)
      multiply_queries(scores, query_view + (((step >> 2) * (ROWS * PANEL_ROW) + (step & 3) * 32) >> 4),
                       key_view + ((slot * TILE + (step >> 2) * (KEYS * PANEL_ROW) + (step & 3) * 32) >> 4), step != 0);
    close_products();
  };
  auto start_sums = [&](int slot) {
    start_products();
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++)
      multiply_weights(accumulator, weights[step], value_view + ((slot * TILE + step * 16 * PANEL_ROW) >> 4));
    close_products();
  };
  int begin[2] = {0, 0}, place[2];
  Softmax<2> softmax;
  softmax.clear();
  auto weigh = [&](int tile) {
    const int first = work.key_begin + tile * KEYS;
    if (first + KEYS > work.key_end || (WINDOW && first < max(begin[0], begin[1])))
      mask_scores(scores, begin, work.key_end, first, lane);
    online_softmax(scores, softmax, shrink, scale);
  };
  auto pack_weights = [&]() {
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) pack_step(weights[step], scores, step);
  };

  // Copy group i holds the keys of tile i and the values of tile i - 1; tile t uses slot t % STAGES of both rings.
  copy(keys, segment.key_token, key_ring, 0, 0);
  copy_queries<D, R, ROWS, THREADS>(query_tile, queries, query_row, query_head, work, members, head_base);
  close_copy_group();
#pragma unroll 1
  for (int i = 1; i < STAGES; i++) {
    copy(values, segment.value_token, value_ring, i - 1, i - 1);
    copy(keys, segment.key_token, key_ring, i, i);
    close_copy_group();
  }
  partial_places<R>(place, work, members, folded, head_base, gridDim.y * R, lane);
  if (WINDOW) window_begins<R>(begin, work, members, lengths, folded, lane);
#pragma unroll
  for (int i = 0; i < D / 2; i++) accumulator[i] = 0.f;

  wait_for_copies<STAGES - 1>();
  publish_copies();
  __syncthreads();
  start_scores(0);
  wait_for_products<0>();
  products_are_ready(scores);
  weigh(0);
  pack_weights();
  int before = 0, now = 1;
  for (int tile = 1; tile < tiles; tile++) {
    wait_for_copies<STAGES - 2>();
    publish_copies();
    __syncthreads();
    start_scores(now);
    start_sums(before);
    copy(values, segment.value_token, value_ring, tile + STAGES - 2, before == 0 ? STAGES - 1 : before - 1);
    copy(keys, segment.key_token, key_ring, tile + STAGES - 1, before);
    close_copy_group();
    before = now;
    now = now + 1 == STAGES ? 0 : now + 1;
    wait_for_products<1>();
    products_are_ready(scores);
    weigh(tile);
    if (softmax.sum[0] + softmax.sum[1] < 0.f) break;  // never taken: without it ptxas moves the next wait above the softmax
    wait_for_products<0>();
    products_are_ready(accumulator);
#pragma unroll
    for (int i = 0; i < D / 2; i++) accumulator[i] *= shrink[(i >> 1) & 1];
    pack_weights();
  }
  wait_for_copies<0>();
  publish_copies();
  __syncthreads();
  start_sums(before);
  wait_for_products<0>();
  products_are_ready(accumulator);
  store_partial<D>(out, log_sum, accumulator, softmax, scale, place, lane);
}

}  // namespace shared_attention
