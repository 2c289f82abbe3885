/* SPDX-License-Identifier: MIT */
/*
 * A reliable connection between two devices, RXE_DEV and RXE_DEV1, whose wire
 * may lose and reorder packets. Checks the data of every operation and counts
 * errors.
 *
 *   losses MODE [OPERATIONS [SEED [LONGEST [EMPTY]]]]
 *
 * MODE is the set of operations that may be in flight together:
 *   sends    sends, writes, writes with immediate data
 *   fetches  reads, fetch-adds, compare-swaps
 *   turns    sends and fetches, but not at the same time
 *   mixed    all
 *   fenced   fetches, each with a fence; rdma_rxe retransmits none, which wire.sh
 *            takes for a wire without losses
 * LONGEST is the maximum size of an operation; one in EMPTY has no data.
 *
 * After a failure, or STALL_MS without progress, both queue pairs are replaced. The
 * last line has the counts; the exit status is 1 if an operation with wrong data
 * completed successfully, otherwise 0.
 */
#include "common.h"

#include <stdarg.h>

enum {
	DEPTH = 16,
	SIZE = 20000,
	RECEIVES = 64,
	TURN_LENGTH = 40,
	PAUSE_MS = 50,
	STALL_MS = 5000,
	/* The passive side's memory: a slot for each write in flight, receive
	 * buffers, data to read, two words for atomics. */
	RECV_AT = DEPTH * SIZE,
	CONSTANT_AT = RECV_AT + RECEIVES * SIZE,
	WORDS_AT = (CONSTANT_AT + SIZE + 63) / 64 * 64,
	MEMORY = WORDS_AT + 64,
	CONSTANT = 9999,
};

enum kind { SEND, WRITE, WRITE_IMM, READ, ADD, SWAP, KINDS };
static const char *const names[KINDS] = {
	"send", "write", "write-imm", "read", "fetch-add", "compare-swap"};
static const enum ibv_wr_opcode opcodes[KINDS] = {
	IBV_WR_SEND,	  IBV_WR_RDMA_WRITE,	       IBV_WR_RDMA_WRITE_WITH_IMM,
	IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP};

struct operation {
	unsigned number, len;
	enum kind kind;
	uint64_t old; /* the value before an atomic operation */
};

static struct ibv_context *ctx_a, *ctx_b;
static struct ibv_pd *pd_a, *pd_b;
static union ibv_gid gid_a, gid_b;
static struct end a, b;
static struct pair_opts opts = {.type = IBV_QPT_RC, .size = MEMORY};

static struct operation in_flight[DEPTH];	  /* by number % DEPTH */
static unsigned first, next;		  /* in flight: first to next - 1 */
static struct operation expected[2 * RECEIVES]; /* by the passive side */
static unsigned expected_first, expected_next;
static uint64_t words[2];
static unsigned longest = SIZE, empty;
static bool fenced;

static struct {
	unsigned ok[KINDS], wrong[KINDS], failed, flushed, stalls, reconnects,
		missing;
	unsigned statuses[32];
} count;

static uint64_t rng;

static unsigned random_below(unsigned n)
{
	rng = rng * 6364136223846793005ULL + 1442695040888963407ULL;
	return (unsigned)(rng >> 33) % n;
}

static bool differs(const uint8_t *p, unsigned len, unsigned seed, unsigned *at)
{
	static uint8_t want[SIZE];

	pattern(want, len, seed);
	for (*at = 0; *at < len; ++*at)
		if (p[*at] != want[*at])
			return true;
	return false;
}

static void report_wrong(enum kind kind, unsigned number, const char *fmt, ...)
{
	va_list ap;

	if (++count.wrong[kind] > 5)
		return;
	printf("wrong: %s %u: ", names[kind], number);
	va_start(ap, fmt);
	vprintf(fmt, ap);
	va_end(ap);
	printf("; states %d %d\n", qp_state(a.qp), qp_state(b.qp));
}

static void connect_ends(void)
{
	unsigned i;

	end_open(&a, ctx_a, pd_a, &opts, false);
	end_open(&b, ctx_b, pd_b, &opts, false);
	end_connect(&a, &opts, b.qp->qp_num, &gid_b);
	end_connect(&b, &opts, a.qp->qp_num, &gid_a);
	pattern(b.buf + CONSTANT_AT, SIZE, CONSTANT);
	memset(b.buf + WORDS_AT, 0, 16);
	memset(words, 0, sizeof(words));
	for (i = 0; i < RECEIVES; i++)
		post_recv(&b, i, RECV_AT + i * SIZE, SIZE);
	first = next;
	expected_first = expected_next;
}

/* Moves both queue pairs to ERR, reads the flushed operations, destroys the ends. */
static void disconnect_ends(void)
{
	double end = now_ms() + 2000;
	struct ibv_wc wc;

	qp_to(a.qp, IBV_QPS_ERR);
	qp_to(b.qp, IBV_QPS_ERR);
	while (first != next && now_ms() < end) {
		if (ibv_poll_cq(a.cq, 1, &wc) == 1) {
			count.flushed++;
			first++;
		} else {
			sleep_ms(1);
		}
	}
	count.missing += next - first;
	end_close(&a);
	end_close(&b);
}

static void post(enum kind kind)
{
	unsigned slot = next % DEPTH, n = next;
	unsigned len = kind >= ADD	       ? 8 :
		       empty && !random_below(empty) ? 0 :
		       random_below(3)		       ? 1 + random_below(longest) :
						 1 + random_below(64);
	struct operation *f = &in_flight[slot];
	struct op op = op_on(&a, opcodes[kind], n, slot * SIZE, len);

	*f = (struct operation){.number = n, .len = len, .kind = kind};
	op.remote = (uintptr_t)b.buf;
	op.rkey = b.mr->rkey;
	if (fenced)
		op.flags |= IBV_SEND_FENCE;
	switch (kind) {
	case SEND:
	case WRITE_IMM:
		expected[expected_next++ % ARRAY_SIZE(expected)] = *f;
		op.imm = htonl(n);
		/* fall through */
	case WRITE:
		pattern(a.buf + slot * SIZE, len, n);
		op.remote += slot * SIZE;
		break;
	case READ:
		memset(a.buf + slot * SIZE, 0, len);
		op.remote += CONSTANT_AT;
		break;
	case ADD:
		memset(a.buf + slot * SIZE, 0xff, 8);
		op.remote += WORDS_AT;
		op.compare_add = n + 1;
		f->old = words[0];
		words[0] += n + 1;
		break;
	default:
		memset(a.buf + slot * SIZE, 0xff, 8);
		op.remote += WORDS_AT + 8;
		op.compare_add = words[1];
		op.swap = n + 1;
		f->old = words[1];
		words[1] = n + 1;
		break;
	}
	POST_OK(&a, &op, 1, POST);
	next++;
}

/* Checks an operation that completed successfully. */
static void handle_completion(const struct ibv_wc *wc)
{
	struct operation *f = &in_flight[first % DEPTH];
	uint8_t *local = a.buf + first % DEPTH * SIZE;
	uint8_t *remote = b.buf + first % DEPTH * SIZE;
	unsigned at;
	uint64_t old;

	EQ(wc->wr_id, f->number);
	first++;
	count.ok[f->kind]++;
	switch (f->kind) {
	case SEND:
		break;
	case WRITE:
	case WRITE_IMM:
		if (differs(remote, f->len, f->number, &at))
			report_wrong(f->kind, f->number, "byte %u of %u", at, f->len);
		break;
	case READ:
		if (differs(local, f->len, CONSTANT, &at))
			report_wrong(f->kind, f->number, "byte %u of %u is %#x", at,
				     f->len, local[at]);
		break;
	default:
		memcpy(&old, local, 8);
		if (old != f->old)
			report_wrong(f->kind, f->number, "old value %#" PRIx64 ", not %#" PRIx64,
				     old, f->old);
	}
}

static void handle_receive(const struct ibv_wc *wc)
{
	struct operation *f = &expected[expected_first % ARRAY_SIZE(expected)];
	uint8_t *data = b.buf + RECV_AT + wc->wr_id * SIZE;
	unsigned at;

	if (expected_first == expected_next)
		FAIL("more messages than sent");
	expected_first++;
	if (wc->byte_len != f->len)
		report_wrong(f->kind, f->number, "%u bytes arrived of %u", wc->byte_len,
			     f->len);
	else if (f->kind == WRITE_IMM && ntohl(wc->imm_data) != f->number)
		report_wrong(f->kind, f->number, "immediate data %u", ntohl(wc->imm_data));
	else if (f->kind == SEND && differs(data, f->len, f->number, &at))
		report_wrong(f->kind, f->number, "byte %u of %u", at, f->len);
	post_recv(&b, wc->wr_id, RECV_AT + wc->wr_id * SIZE, SIZE);
}

static void report_failure(const char *side, const struct ibv_wc *wc)
{
	count.statuses[wc->status % 32]++;
	if (++count.failed <= 5)
		printf("failed: %s: %s, states %d %d, %u in flight, first a %s\n",
		       side, ibv_wc_status_str(wc->status), qp_state(a.qp),
		       qp_state(b.qp), next - first,
		       first == next ? "none" : names[in_flight[first % DEPTH].kind]);
}

static void reconnect(void)
{
	count.reconnects++;
	disconnect_ends();
	connect_ends();
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "turns";
	unsigned total = argc > 2 ? atoi(argv[2]) : 400;
	bool sends, fetches = strcmp(mode, "sends");
	bool turns = !strcmp(mode, "turns"), has_paused = true;
	double last_progress, start = now_ms();
	unsigned i, all = 0, bad = 0;
	struct ibv_wc wc;

	fenced = !strcmp(mode, "fenced");
	sends = !fenced && strcmp(mode, "fetches");
	rng = argc > 3 ? atoi(argv[3]) : 1;
	if (argc > 4)
		longest = atoi(argv[4]);
	if (argc > 5)
		empty = atoi(argv[5]);
	CHECK(longest && longest <= SIZE);
	test_limit(getenv("LIMIT") ? atoi(getenv("LIMIT")) : 300);
	ctx_a = open_device();
	ctx_b = open_device_named(MUST(getenv("RXE_DEV1")));
	pd_a = MUST(ibv_alloc_pd(ctx_a));
	pd_b = MUST(ibv_alloc_pd(ctx_b));
	OK(ibv_query_gid(ctx_a, 1, gid_index(ctx_a), &gid_a));
	OK(ibv_query_gid(ctx_b, 1, gid_index(ctx_b), &gid_b));
	setvbuf(stdout, NULL, _IOLBF, 0);
	connect_ends();
	last_progress = now_ms();
	while (next < total || first != next || expected_first != expected_next) {
		bool idle = true, broken = false;
		bool none_in_flight = first == next && expected_first == expected_next;

		if (turns && next % TURN_LENGTH == 0 && !has_paused) {
			if (none_in_flight) {
				sleep_ms(PAUSE_MS);
				has_paused = true;
			}
		} else if (next < total && next - first < DEPTH &&
			   expected_next - expected_first < RECEIVES / 2) {
			bool send = turns ? next / TURN_LENGTH % 2 == 0 :
				    sends && fetches ? random_below(2) : sends;

			post(send ? random_below(3) : READ + random_below(3));
			has_paused = false;
			idle = false;
		}
		while (!broken && ibv_poll_cq(b.cq, 1, &wc) == 1) {
			idle = false;
			if (wc.status == IBV_WC_SUCCESS) {
				handle_receive(&wc);
			} else {
				report_failure("passive", &wc);
				broken = true;
			}
		}
		while (!broken && ibv_poll_cq(a.cq, 1, &wc) == 1) {
			idle = false;
			if (wc.status == IBV_WC_SUCCESS) {
				handle_completion(&wc);
			} else {
				report_failure("active", &wc);
				first++;
				broken = true;
			}
		}
		if (idle && now_ms() - last_progress > STALL_MS) {
			printf("stall: states %d %d, %u in flight, first a %s %u, "
			       "%u receives expected\n",
			       qp_state(a.qp), qp_state(b.qp), next - first,
			       first == next ? "none" :
					       names[in_flight[first % DEPTH].kind],
			       first, expected_next - expected_first);
			count.stalls++;
			broken = true;
		}
		if (broken)
			reconnect();
		if (!idle || broken)
			last_progress = now_ms();
		else
			sleep_ms(1);
	}
	disconnect_ends();
	for (i = 0; i < KINDS; i++) {
		all += count.ok[i];
		bad += count.wrong[i];
	}
	printf("RESULT %s posted=%u done=%u wrong=%u (", mode, total, all, bad);
	for (i = 0; i < KINDS; i++)
		printf("%s%u/%u", i ? " " : "", count.wrong[i], count.ok[i]);
	printf(") failed=%u stalls=%u reconnects=%u flushed=%u missing=%u seconds=%.1f\n",
	       count.failed, count.stalls, count.reconnects, count.flushed,
	       count.missing, (now_ms() - start) / 1000);
	OK(ibv_dealloc_pd(pd_a));
	OK(ibv_dealloc_pd(pd_b));
	OK(ibv_close_device(ctx_a));
	OK(ibv_close_device(ctx_b));
	return bad > 0;
}
