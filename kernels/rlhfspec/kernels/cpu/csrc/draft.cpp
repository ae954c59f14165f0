// All levels of a draft behind the first in one call: choose the frontier, run it through the draft model, add its
// candidates, and ask whether one more level pays. The slow twin is drafting/model.py; tests hold their trees equal.
#include <string.h>

#include <algorithm>

#include "decoder.h"
#include "draft_rules.h"
#include "gumbel.h"
#include "scratch.h"

namespace {

constexpr int64_t kSlotOutside = -1, kBadTemperature = -2;  // problems besides those of tree_attention_plan

// Mirrors _DraftStruct in draft.py.
struct Draft {
    const void* decoder;
    int64_t vocab_size, num_slots, threads;
    // the sequences: [num_sequences]
    const int32_t *rows, *lengths, *prompt_lengths, *room;
    const uint64_t* seeds;
    const float* temperatures;
    const double* shifts;
    int64_t num_sequences;
    const int32_t* capacity;  // [table_height] slots that each row of the table owns
    const int32_t* slot_table;
    int64_t table_height, table_width, table_stride;
    // the first level: k candidates of each of num_roots sequences
    const int32_t *roots, *root_tokens;
    const float* root_scores;
    int64_t num_roots, k;
    const double* log_odds;
    int64_t depth, width, branch;
    // what comes out; `most_nodes` and `most_expanded` columns
    int32_t* nodes;     // 5 rows: sequence, parent, depth, token, rank
    float* chances;     // 2 rows: gap, path acceptance
    int32_t* expanded;  // 4 rows: sequence, parent, token, held_at
    int64_t most_nodes, most_expanded;
    int64_t* level_rows;  // [depth - 1]
    int64_t num_nodes, num_levels, problem, problem_row;
    // when to stop
    int64_t has_rule;
    PayingLevel rule;
};

struct MorePromising {
    const float* path_acceptance;
    bool operator()(int32_t a, int32_t b) const {  // of equals the first
        return path_acceptance[a] > path_acceptance[b] || (path_acceptance[a] == path_acceptance[b] && a < b);
    }
};

struct Ascending {  // of a type of this file, so that std::sort is too: see the rules in simd.h
    bool operator()(int32_t a, int32_t b) const { return a < b; }
};

void exchange(int32_t*& a, int32_t*& b) {
    int32_t* kept = a;
    a = b, b = kept;
}

// What a level needs besides its nodes.
struct Working {
    int32_t *num_expanded, *num_taken;  // [sequences] before this level; of this level
    int32_t* allowed;  // nodes of a level that may be expanded
    int32_t *frontier, *last_frontier, *sequence;
    int32_t *slots, *table_rows, *context_lens, *extra_lens, *groups;
    int32_t *extra, *last_extra;  // [rows, depth - 1]
    long *tokens, *positions, *wanted;
    uint64_t* seeds;
    int32_t *noise_positions, *candidates;
    float *temperatures, *scores, *logits;

    Working(Cutter* cut, const Draft& d) {
        const long most = d.width * d.num_sequences;  // rows of a level
        auto ints = [=](long count) { return cut->take<int32_t>(count); };
        num_expanded = ints(d.num_sequences), num_taken = ints(d.num_sequences);
        allowed = ints((most > d.num_roots ? most : d.num_roots) * d.branch);
        frontier = ints(most), last_frontier = ints(most), sequence = ints(most);
        slots = ints(most), table_rows = ints(most), context_lens = ints(most), extra_lens = ints(most);
        groups = ints(most + 1);
        extra = ints(most * (d.depth - 1)), last_extra = ints(most * (d.depth - 1));
        tokens = cut->take<long>(most), positions = cut->take<long>(most), wanted = cut->take<long>(most);
        seeds = cut->take<uint64_t>(most);
        noise_positions = ints(most), candidates = ints(most * d.k);
        temperatures = cut->take<float>(most), scores = cut->take<float>(most * d.k);
        logits = cut->take<float>(most * d.vocab_size);
    }
};

struct Tree {
    Draft& d;
    Working w;
    int32_t *sequence, *parent, *depth_of, *token, *rank;
    float *gap, *path_acceptance;
    int32_t *expanded_sequence, *expanded_parent, *expanded_token, *expanded_held_at;
    long level_start = 0;   // first node of the last level
    long num_expanded = 0;  // rows run so far
    long num_frontier = 0;

    Tree(Draft& draft, const Working& working) : d(draft), w(working) {
        int32_t** columns[] = {&sequence, &parent, &depth_of, &token, &rank};
        for (int i = 0; i < 5; ++i) *columns[i] = d.nodes + i * d.most_nodes;
        int32_t** kept[] = {&expanded_sequence, &expanded_parent, &expanded_token, &expanded_held_at};
        for (int i = 0; i < 4; ++i) *kept[i] = d.expanded + i * d.most_expanded;
        gap = d.chances, path_acceptance = d.chances + d.most_nodes;
        memset(w.num_expanded, 0, (size_t)d.num_sequences * sizeof(int32_t));
    }

    int32_t free_slots(int32_t s) const { return d.capacity[d.rows[s]] - d.lengths[s] - w.num_expanded[s]; }

    // tokens, scores [rows, k]: of each parent, `branch` candidates become nodes. parents null: the roots.
    void add_children(long rows, const int32_t* sequences, const int32_t* parents, const int32_t* tokens,
                      const float* scores, int32_t depth) {
        level_start = d.num_nodes;
        for (long i = 0; i < rows; ++i, tokens += d.k, scores += d.k) {
            float above = parents == nullptr ? 1.0f : path_acceptance[parents[i]];
            for (long r = 0; r < d.branch; ++r) {
                if (tokens[r] < 0) continue;  // padding of vocabularies smaller than k
                long node = d.num_nodes++;
                sequence[node] = sequences[i], parent[node] = parents == nullptr ? -1 : parents[i];
                depth_of[node] = depth, token[node] = tokens[r], rank[node] = (int32_t)r;
                gap[node] = gap_of(tokens, scores, r);
                path_acceptance[node] =
                    above * chance_of(d.log_odds, d.shifts[sequences[i]], depth, (int32_t)r, gap[node]);
            }
        }
    }

    // The most promising nodes of the last level that have room below and a free slot, ascending.
    void choose_frontier(int32_t level) {
        int32_t* all = w.allowed;
        long count = 0, limit = d.width * d.num_sequences;
        for (long node = level_start; node < d.num_nodes; ++node)
            if (d.room[sequence[node]] > level && free_slots(sequence[node]) > 0) all[count++] = (int32_t)node;
        if (count > limit) {
            std::nth_element(all, all + limit - 1, all + count, MorePromising{path_acceptance});
            std::sort(all, all + limit, Ascending());
            count = limit;
        }
        exchange(w.frontier, w.last_frontier);
        num_frontier = 0;
        memset(w.num_taken, 0, (size_t)d.num_sequences * sizeof(int32_t));
        for (long i = 0; i < count; ++i) {  // never more of one sequence than it has free slots
            int32_t s = sequence[all[i]];
            if (w.num_taken[s] >= free_slots(s)) continue;
            ++w.num_taken[s];
            w.frontier[num_frontier++] = all[i];
        }
    }

    // Gives each frontier node a free slot and describes its row for the draft's forward.
    void expand(int32_t level) {
        const long width = level - 1, row_bytes = (width - 1) * (long)sizeof(int32_t);
        long above = 0;
        exchange(w.extra, w.last_extra);
        for (long i = 0; i < num_frontier; ++i) {
            int32_t node = w.frontier[i], s = sequence[node], row = d.rows[s];
            int32_t held_at = d.lengths[s] + w.num_expanded[s]++;
            w.sequence[i] = s;
            w.slots[i] = d.slot_table[row * d.table_stride + held_at];
            w.table_rows[i] = row, w.context_lens[i] = d.lengths[s];
            if (width > 1) {
                while (w.last_frontier[above] < parent[node]) ++above;  // both ascend
                memcpy(w.extra + i * width, w.last_extra + above * (width - 1), row_bytes);
            }
            w.extra[i * width + width - 1] = w.slots[i];
            w.tokens[i] = token[node], w.positions[i] = d.lengths[s] + level - 2, w.wanted[i] = i;
            w.seeds[i] = d.seeds[s], w.temperatures[i] = d.temperatures[s];
            w.noise_positions[i] = d.lengths[s] - d.prompt_lengths[s] + level - 1;
            long at = num_expanded++;
            expanded_sequence[at] = s, expanded_parent[at] = width > 1 ? (int32_t)above : -1;
            expanded_token[at] = token[node], expanded_held_at[at] = held_at;
        }
    }

    // False, with the problem noted, if an index is impossible.
    bool run(int32_t level) {
        Batch batch{w.slots, w.table_rows, w.context_lens, w.extra, d.slot_table, w.extra_lens, w.groups, num_frontier,
                    level - 1, d.table_height, d.table_width, d.table_stride, 0, 0, 0, 0, 0, 0};
        RS_NAME(tree_attention_plan)(&batch);
        d.problem = batch.problem, d.problem_row = batch.problem_row;
        if (d.problem == 0 && batch.highest_slot >= d.num_slots) d.problem = kSlotOutside;
        if (d.problem != 0) return false;
        int threads = (int)d.threads;
        RS_NAME(decoder_forward)(d.decoder, &batch, w.tokens, w.positions, num_frontier, w.wanted, num_frontier, w.logits, nullptr,
                                 threads);
        int refused = RS_NAME(gumbel_candidates)(w.logits, d.vocab_size, num_frontier, d.vocab_size, d.k, w.seeds,
                                                 w.noise_positions, w.temperatures, w.candidates, w.scores, threads);
        if (refused) d.problem = kBadTemperature;
        return !refused;
    }

    void grow() {
        add_children(d.num_roots, d.roots, nullptr, d.root_tokens, d.root_scores, 1);
        for (int32_t level = 2; level <= d.depth; ++level) {
            choose_frontier(level);
            if (num_frontier == 0) return;
            if (d.has_rule && !d.rule.go_on(path_acceptance, w.frontier, num_frontier)) return;
            expand(level);
            if (!run(level)) return;
            add_children(num_frontier, w.sequence, w.frontier, w.candidates, w.scores, level);
            d.level_rows[d.num_levels++] = num_frontier;
        }
    }
};

}  // namespace

RS_EXPORT void RS_NAME(draft_grow)(Draft* draft) {
    static thread_local Scratch scratch;
    Draft& d = *draft;
    Cutter counted(nullptr);
    Working(&counted, d);
    Cutter cut(scratch.get<char>((long)counted.used));
    Tree(d, Working(&cut, d)).grow();
}

namespace {

// Mirrors _KeepStruct in draft.py. What a draft expanded, level by level, and where its sequences stand now.
struct Keep {
    const int32_t *sequence, *parent, *token, *held_at;  // [expanded]; parent: index in the level above
    const int64_t* level_rows;                           // [num_levels]
    int64_t num_levels;
    const int32_t *rows, *lengths, *new_lengths;  // [sequences]; lengths: when the draft began
    const int32_t* tokens;                        // [table rows, token_stride]
    int32_t* slot_table;                          // [table rows, table_stride]
    int32_t* cached;                              // [table rows]
    uint8_t* alive;                               // [expanded], for the call
    int64_t token_stride, table_stride;
};

}  // namespace

// Keeps the draft KV of expanded nodes that the target chose, by swapping entries of the slot table.
RS_EXPORT void RS_NAME(draft_keep)(const Keep* keep) {
    const Keep& k = *keep;
    long start = 0, above = 0;
    for (long level = 0; level < k.num_levels; ++level) {
        long end = start + k.level_rows[level];
        for (long i = start; i < end; ++i) {
            int32_t s = k.sequence[i], row = k.rows[s], position = k.lengths[s] + (int32_t)level;
            // the last committed token was not run by the target either: it stays the next root
            k.alive[i] = (level == 0 || k.alive[above + k.parent[i]]) && position < k.new_lengths[s] - 1 &&
                         k.tokens[row * k.token_stride + position] == k.token[i];
            if (!k.alive[i]) continue;
            int32_t *slots = k.slot_table + row * k.table_stride, kept = slots[k.held_at[i]];
            slots[k.held_at[i]] = slots[position];
            slots[position] = kept;
            k.cached[row] = position + 1;
        }
        above = start, start = end;
    }
}

// What Python fills in must be as long as what is read here.
RS_EXPORT void RS_NAME(draft_sizes)(long* sizes) {
    long here[] = {sizeof(Draft), sizeof(Keep)};
    sizes[0] = here[0], sizes[1] = here[1];
}
