/* SPDX-License-Identifier: MIT */
/* Built as a library: a call into one takes longer than a call within the program. */
#include "floor_calls.h"

#include <errno.h>
#include <string.h>

static int load_entry(struct floor_cursor *cursor)
{
	const struct rxe_queue_buf *ring = cursor->ring;

	if (cursor->at == cursor->producer)
		return ENOENT;
	cursor->entry = (const struct ib_uverbs_wc *)
		(ring->data + ((size_t)cursor->at << 7));
	cursor->status = cursor->entry->status;
	cursor->wr_id = cursor->entry->wr_id;
	return 0;
}

static int start(struct floor_cursor *cursor)
{
	const struct rxe_queue_buf *ring = cursor->ring;
	int missing;

	if (cursor->lock)
		pthread_spin_lock(cursor->lock);
	cursor->at = ring->consumer_index;
	cursor->producer = __atomic_load_n(&ring->producer_index,
					   __ATOMIC_ACQUIRE);
	missing = load_entry(cursor);
	if (missing && cursor->lock)
		pthread_spin_unlock(cursor->lock);
	return missing;
}

static int next(struct floor_cursor *cursor)
{
	cursor->at = (cursor->at + 1) & cursor->ring->index_mask;
	return load_entry(cursor);
}

static void end(struct floor_cursor *cursor)
{
	struct rxe_queue_buf *ring = cursor->ring;

	__atomic_store_n(&ring->consumer_index,
			 (cursor->at + 1) & ring->index_mask, __ATOMIC_RELEASE);
	if (cursor->lock)
		pthread_spin_unlock(cursor->lock);
}

#define READ(name, field)                                \
	static uint32_t name(struct floor_cursor *cursor) \
	{                                                 \
		return cursor->entry->field;              \
	}
READ(opcode, opcode)
READ(byte_len, byte_len)
READ(imm_data, ex.imm_data)
READ(qp_num, qp_num)
READ(wc_flags, wc_flags)

void floor_cursor_init(struct floor_cursor *cursor, struct rxe_queue_buf *ring,
		       pthread_spinlock_t *lock)
{
	*cursor = (struct floor_cursor){
		.ring = ring,
		.lock = lock,
		.start = start,
		.next = next,
		.end = end,
		.read = { opcode, byte_len, imm_data, qp_num, wc_flags },
	};
}

static int poll(struct rxe_queue_buf *ring, int entries, struct ibv_wc *wc)
{
	uint32_t at = ring->consumer_index;
	uint32_t producer = __atomic_load_n(&ring->producer_index,
					    __ATOMIC_ACQUIRE);
	int n = 0;

	while (n < entries && at != producer) {
		memcpy(&wc[n++], ring->data + ((size_t)at << 7), sizeof(*wc));
		at = (at + 1) & ring->index_mask;
	}
	if (n)
		__atomic_store_n(&ring->consumer_index, at, __ATOMIC_RELEASE);
	return n;
}

const floor_poll_fn floor_poll_call = poll;
