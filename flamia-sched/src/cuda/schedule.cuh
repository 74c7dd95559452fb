// What a schedule is on the device, and how the CTAs of an attention kernel walk it.
// The Rust side has the same structures (work/tiling.rs, rows.rs, cuda/header.rs) and the same
// arithmetic (work/heads.rs, work/assign.rs); tests hold the two against each other.
#pragma once

#include "parameters.cuh"

using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// A run of rows of one document, 16 bytes: one load.
struct alignas(16) WorkItem {
    int document;  // empty documents counted
    int first;     // first row of the run, from the document's start
    int start;     // the document's first row in the packed row
    int len;       // rows of the document
};

struct alignas(16) RowPlace {
    int document;
    int position;  // from the document's start
    int start;
    int end;
};

struct alignas(16) TileBounds {
    int first_document;
    int last_document;
    int start;
    int end;
};

enum Pass { FORWARD = 0, BACKWARD = 1, PASSES = 2 };

struct ScheduleHeader {
    u64 fault;           // 0: the boundaries are sound; otherwise see Fault
    i64 fault_value;     // the bad boundary
    i64 fault_previous;  // the one in front of it
    u32 documents;       // that are not empty
    u32 longest;         // rows of the longest one
    u32 items[PASSES];
    u32 dynamic;         // whether forward positions are acquired dynamically even in one section
    u32 counters[PASSES];  // for acquire_position(), by the launches of one pass one after another
    u32 reserved[3];
};

static_assert(sizeof(WorkItem) == HOST_SIZEOF_WORK_ITEM, "host and device disagree");
static_assert(sizeof(RowPlace) == HOST_SIZEOF_ROW_PLACE, "host and device disagree");
static_assert(sizeof(TileBounds) == HOST_SIZEOF_TILE_BOUNDS, "host and device disagree");
SAME_OFFSET(ScheduleHeader, fault);
SAME_OFFSET(ScheduleHeader, fault_value);
SAME_OFFSET(ScheduleHeader, fault_previous);
SAME_OFFSET(ScheduleHeader, documents);
SAME_OFFSET(ScheduleHeader, longest);
SAME_OFFSET(ScheduleHeader, items);
SAME_OFFSET(ScheduleHeader, dynamic);
SAME_OFFSET(ScheduleHeader, counters);
SAME_OFFSET(ScheduleHeader, reserved);

// Heads in sections, as work/heads.rs has them.
struct HeadSections {
    u32 heads;
    u32 per_section;
};

struct Assignment {
    u32 item;
    u32 head;
};

__device__ inline u32 position_count(u32 items, HeadSections order) { return items * order.heads; }

// The item and head at a position below position_count().
__device__ inline Assignment assignment_at(u32 position, u32 items, HeadSections order) {
    const u32 section = position / (items * order.per_section);
    const u32 first_head = section * order.per_section;
    const u32 within = position - first_head * items;
    const u32 width = min(order.per_section, order.heads - first_head);
    return {within / width, first_head + within % width};
}

// Whether positions are acquired dynamically: alternation evens out one falling order only, and
// every section starts again with its longest item.
__device__ inline bool acquires_dynamically(const ScheduleHeader* header, HeadSections order) {
    return header->dynamic != 0 || order.per_section < order.heads;
}

// Static assignment to a persistent grid: every other run of positions backwards. To its CTAs, or to `workers`
// of which this is one.
__device__ inline u32 alternating_position(u32 round, u32 worker = blockIdx.x, u32 workers = gridDim.x) {
    const u32 place = round % 2 == 0 ? worker : workers - 1 - worker;
    return round * workers + place;
}

// Dynamic acquisition, by one thread of a CTA, or of one of several workers: the next free position, or one
// past the last when there is none. Every worker of the grid must ask until it is told so, once: then the
// counter has wrapped to zero, ready for the next launch without a reset.
__device__ inline u32 acquire_position(u32* counter, u32 positions, u32 workers = gridDim.x) {
    return atomicInc(counter, positions + workers - 1);
}
