// A group's rows against one chunk of its span, with mma.sync (any GPU from compute capability 8.0 on, any head size that is a
// multiple of 16). The scheme is FlashAttention-2's: queries stay in registers, keys and values stream through shared memory,
// scores never leave the registers.
//
// A block has WARPS warps of 16 folded query rows and reads tiles of KEYS keys through a ring of STAGES tiles.

namespace shared_attention {

// The left operand of every 16-dim step of a 16-row block of queries, read straight from memory.
template <int D, int R>
DEVICE void load_queries(unsigned (&operand)[D / 16][4], const Element* queries, long long row_stride, long long head_stride,
                         const Work& work, const Member* members, int folded, int head_base, int lane) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = folded + h * 8 + (lane >> 2);
    const bool valid = row < work.folded_end;
    const int safe = valid ? row : work.folded_begin;
    const Element* from = queries + members[work.first_member + safe / R].row * row_stride +
                          (head_base + safe % R) * head_stride + 2 * (lane & 3);
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
      operand[step][h] = valid ? *(const unsigned*)(from + step * 16) : 0u;
      operand[step][2 + h] = valid ? *(const unsigned*)(from + step * 16 + 8) : 0u;
    }
  }
}

template <int D, int R, int WARPS, int KEYS, int STAGES, bool WINDOW>
DEVICE void span_mma(const Element* queries, long long query_row, long long query_head, const Segment& segment, const Work& work,
                     const Member* members, const int* lengths, float softmax_scale, float* out, float* log_sum,
                     unsigned char* buffer) {
  constexpr int THREADS = WARPS * 32, TILE = tile_bytes(KEYS, D);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, matrix = lane >> 3, matrix_row = lane & 7;
  const int head = blockIdx.y, head_base = head * R, folded = work.folded_begin + warp * 16;
  const bool has_rows = folded < work.folded_end;
  const float scale = softmax_scale * LOG2_E;
  const Element* keys = segment.keys + work.slot * segment.key_slot + head * segment.key_head;
  const Element* values = segment.values + work.slot * segment.value_slot + head * segment.value_head;
  const int tiles = (work.key_end - work.key_begin + KEYS - 1) / KEYS;
  const unsigned ring = shared_address(buffer);

  auto copy = [&](int tile, int slot) {
    if (tile < tiles) {
      const int first = work.key_begin + tile * KEYS;
      copy_tile<D, KEYS, THREADS>(ring + slot * 2 * TILE, keys, segment.key_token, first, work.key_end, threadIdx.x);
      copy_tile<D, KEYS, THREADS>(ring + slot * 2 * TILE + TILE, values, segment.value_token, first, work.key_end, threadIdx.x);
    }
    close_copy_group();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) copy(i, i);

  unsigned query[D / 16][4];
  load_queries<D, R>(query, queries, query_row, query_head, work, members, folded, head_base, lane);
  int begin[2] = {0, 0}, place[2];
  partial_places<R>(place, work, members, folded, head_base, gridDim.y * R, lane);
  if (WINDOW) window_begins<R>(begin, work, members, lengths, folded, lane);
  float accumulator[D / 2];
#pragma unroll
  for (int i = 0; i < D / 2; i++) accumulator[i] = 0.f;
  Softmax<2> softmax;
  softmax.clear();

  const unsigned key_row = ((matrix >> 1) * 8 + matrix_row) * PANEL_ROW, key_swizzle = ((matrix & 1) ^ matrix_row) << 4;
  const unsigned value_row = ((matrix & 1) * 8 + matrix_row) * PANEL_ROW, value_swizzle = ((matrix >> 1) ^ matrix_row) << 4;
  int slot = 0;
  for (int tile = 0; tile < tiles; tile++) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    copy(tile + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
    const unsigned key_tile = ring + slot * 2 * TILE, value_tile = key_tile + TILE;
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    if (!has_rows) continue;

    float scores[KEYS / 2];
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) scores[i] = 0.f;
#pragma unroll
    for (int step = 0; step < D / 16; step++)
#pragma unroll
      for (int block = 0; block < KEYS / 16; block++) {
        unsigned key[4];
        load_matrices(key, step_address<KEYS>(key_tile + key_row, key_swizzle, step) + block * 16 * PANEL_ROW);
        multiply_add(scores + 8 * block, query[step], key[0], key[1]);
        multiply_add(scores + 8 * block + 4, query[step], key[2], key[3]);
      }

    const int first = work.key_begin + tile * KEYS;
    if (first + KEYS > work.key_end || (WINDOW && first < max(begin[0], begin[1])))
      mask_scores(scores, begin, work.key_end, first, lane);
    float shrink[2];
    online_softmax(scores, softmax, shrink, scale);
#pragma unroll
    for (int i = 0; i < D / 2; i++) accumulator[i] *= shrink[(i >> 1) & 1];

#pragma unroll
    for (int block = 0; block < KEYS / 16; block++) {
      unsigned weight[4];
      pack_step(weight, scores, block);
#pragma unroll
      for (int step = 0; step < D / 16; step++) {
        unsigned value[4];
        load_matrices_transposed(value, step_address<KEYS>(value_tile + value_row, value_swizzle, step) + block * 16 * PANEL_ROW);
        multiply_add(accumulator + 8 * step, weight, value[0], value[1]);
        multiply_add(accumulator + 8 * step + 4, weight, value[2], value[3]);
      }
    }
  }
  wait_for_copies<0>();
  if (has_rows)
    store_partial<D>(out, log_sum, accumulator, softmax, scale, place, lane);
}

}  // namespace shared_attention
