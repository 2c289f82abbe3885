/* SPDX-License-Identifier: MIT */
/*
 * Two threads on one queue pair and one completion queue under load: each completion
 * is read once, those of each thread in order, and the data is right.
 */
#include "common.h"

#define PER_THREAD 3000
#define WINDOW 40

static struct pair p;
static volatile unsigned char seen[2][PER_THREAD];
/* Outstanding operations of each thread. */
static volatile int in_flight[2];
static volatile unsigned total, received;
static bool extended; /* pollers use start/next/end */
static bool late;     /* the second thread of each kind starts later */

/* Delays the second thread of a kind, so that the first uses the queues alone. */
static void wait_if_late(uintptr_t thread)
{
	while (late && thread &&
	       __atomic_load_n(&total, __ATOMIC_ACQUIRE) < PER_THREAD / 3)
		sched_yield();
}

/* wr_id: thread in the high word, sequence in the low. */
static void *poster(void *arg)
{
	uint64_t thread = (uintptr_t)arg;
	uint32_t seq = 0;

	wait_if_late(thread);
	while (seq < PER_THREAD) {
		struct op ops[4];
		int n = 0, done = 0, rc;

		while (__atomic_load_n(&in_flight[thread], __ATOMIC_ACQUIRE) > WINDOW)
			sched_yield();
		for (n = 0; n < 4 && seq + n < PER_THREAD; n++) {
			size_t off = (thread * PER_THREAD + seq + n) * 64;
			uint32_t *at = (uint32_t *)(p.a.buf + off);

			at[0] = thread;
			at[1] = seq + n;
			ops[n] = op_on(&p.a, IBV_WR_RDMA_WRITE_WITH_IMM,
				       thread << 32 | (seq + n), off, 64);
			pattern(at + 2, 56, seq + n);
			ops[n].remote = (uintptr_t)p.b.buf + off;
			ops[n].rkey = p.b.mr->rkey;
			ops[n].imm = htonl(thread << 24 | (seq + n));
		}
		__atomic_fetch_add(&in_flight[thread], n, __ATOMIC_ACQ_REL);
		rc = post_ops(&p.a, ops, n, p.o.api, &done);
		if (rc && rc != ENOMEM && rc != ENOSPC)
			FAIL("post returned %d", rc);
		if (rc)
			__atomic_fetch_sub(&in_flight[thread], n - done,
					   __ATOMIC_ACQ_REL);
		seq += done;
	}
	return NULL;
}

static void record_completion(uint64_t wr_id, int64_t *last)
{
	uint32_t thread = wr_id >> 32, seq = wr_id;

	CHECK(thread < 2 && seq < PER_THREAD);
	if (__atomic_fetch_add(&seen[thread][seq], 1, __ATOMIC_ACQ_REL))
		FAIL("completion %u of thread %u read twice", seq, thread);
	/* A poller reads the completions of a poster in order. */
	if ((int64_t)seq <= last[thread])
		FAIL("completion %u of thread %u after %lld", seq, thread,
		     (long long)last[thread]);
	last[thread] = seq;
	__atomic_fetch_sub(&in_flight[thread], 1, __ATOMIC_ACQ_REL);
	__atomic_fetch_add(&total, 1, __ATOMIC_ACQ_REL);
}

static void *poller(void *arg)
{
	int64_t last[2] = {-1, -1};
	struct ibv_wc wc[5];

	wait_if_late((uintptr_t)arg);
	while (__atomic_load_n(&total, __ATOMIC_ACQUIRE) < 2 * PER_THREAD) {
		struct ibv_poll_cq_attr attr = {};
		int n, i;

		if (extended) {
			if (ibv_start_poll(p.a.cqx, &attr)) {
				sched_yield();
				continue;
			}
			for (i = 0;; i++) {
				EQ(p.a.cqx->status, IBV_WC_SUCCESS);
				EQ(ibv_wc_read_qp_num(p.a.cqx), p.a.qp->qp_num);
				EQ(ibv_wc_read_byte_len(p.a.cqx), 64);
				record_completion(p.a.cqx->wr_id, last);
				/* Ends with and without ENOENT. */
				if (i == 2 || ibv_next_poll(p.a.cqx))
					break;
			}
			ibv_end_poll(p.a.cqx);
			continue;
		}
		n = ibv_poll_cq(p.a.cq, 5, wc);
		CHECK(n >= 0 && n <= 5);
		for (i = 0; i < n; i++) {
			EQ(wc[i].status, IBV_WC_SUCCESS);
			EQ(wc[i].qp_num, p.a.qp->qp_num);
			EQ(wc[i].byte_len, 64);
			record_completion(wc[i].wr_id, last);
		}
		if (!n)
			sched_yield();
	}
	return NULL;
}

/* Two more threads share the receive queue and its completions. */
static void *receiver(void *arg)
{
	wait_if_late((uintptr_t)arg);
	while (__atomic_load_n(&received, __ATOMIC_ACQUIRE) < 2 * PER_THREAD) {
		struct ibv_wc wc;
		int n = ibv_poll_cq(p.b.cq, 1, &wc);
		uint32_t imm, thread, seq;
		uint32_t *at;

		if (!n) {
			sched_yield();
			continue;
		}
		EQ(n, 1);
		EQ(wc.status, IBV_WC_SUCCESS);
		imm = ntohl(wc.imm_data);
		thread = imm >> 24;
		seq = imm & 0xffffff;
		CHECK(thread < 2 && seq < PER_THREAD);
		at = (uint32_t *)(p.b.buf + (thread * PER_THREAD + seq) * 64ul);
		EQ(at[0], thread);
		EQ(at[1], seq);
		CHECK_PATTERN(at + 2, 56, seq);
		OK(try_recv(&p.b, 0, NULL, 0));
		__atomic_fetch_add(&received, 1, __ATOMIC_ACQ_REL);
	}
	return NULL;
}

static void run(enum api api, bool ex)
{
	pthread_t t[6];
	uintptr_t i;

	extended = ex;
	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC,
					 .api = api,
					 .cq_ex = ex,
					 .wr = 127,
					 .cqe = 511,
					 .min_rnr = 1});
	for (i = 0; i < 100; i++)
		OK(try_recv(&p.b, 0, NULL, 0));
	for (i = 0; i < 2; i++) {
		OK(pthread_create(&t[i], NULL, poster, (void *)i));
		OK(pthread_create(&t[2 + i], NULL, poller, (void *)i));
		OK(pthread_create(&t[4 + i], NULL, receiver, (void *)i));
	}
	for (i = 0; i < 6; i++)
		OK(pthread_join(t[i], NULL));
	EQ(total, 2 * PER_THREAD);
	EQ(received, 2 * PER_THREAD);
	for (i = 0; i < PER_THREAD; i++)
		CHECK(seen[0][i] == 1 && seen[1][i] == 1);
	EXPECT_NO_WC(p.a.cq);
	EXPECT_NO_WC(p.b.cq);
	pair_close(&p);
}

static void t_post(void)
{
	run(POST, false);
}

static void t_late(void)
{
	late = true;
	run(POST, false);
}

static void t_late_ex(void)
{
	late = true;
	run(WR, true);
}

static void t_wr(void)
{
	run(WR, false);
}

static void t_ex(void)
{
	run(WR, true);
}

/* Two threads post receives to one SRQ: none is lost or duplicated. */
static volatile unsigned char srq_seen[2][PER_THREAD];

static void *srq_poster(void *arg)
{
	uint64_t thread = (uintptr_t)arg;
	uint32_t seq = 0;

	while (seq < PER_THREAD) {
		struct ibv_sge sge = sge_on(&p.b, 0, 8);
		int rc = try_recv(&p.b, thread << 32 | seq, &sge, 1);

		if (rc == ENOMEM) {
			sched_yield();
			continue;
		}
		OK(rc);
		seq++;
	}
	return NULL;
}

static void t_srq(void)
{
	pthread_t t[2];
	uintptr_t i;
	int64_t last[2] = {-1, -1};
	int n = 0, sent = 0;

	pair_open(&p, (struct pair_opts){
			      .type = IBV_QPT_RC, .srq = true, .min_rnr = 1});
	for (i = 0; i < 2; i++)
		OK(pthread_create(&t[i], NULL, srq_poster, (void *)i));
	while (n < 2 * PER_THREAD) {
		struct ibv_wc wc;
		struct op op = op_on(&p.a, IBV_WR_SEND, 0, 0, 8);
		uint32_t thread, seq;

		while (sent < 2 * PER_THREAD && sent - n < 20) {
			POST_OK(&p.a, &op, 1, POST);
			sent++;
		}
		while (ibv_poll_cq(p.a.cq, 1, &wc) == 1)
			EQ(wc.status, IBV_WC_SUCCESS);
		if (!ibv_poll_cq(p.b.cq, 1, &wc)) {
			sched_yield();
			continue;
		}
		EQ(wc.status, IBV_WC_SUCCESS);
		thread = wc.wr_id >> 32;
		seq = wc.wr_id;
		CHECK(thread < 2 && seq < PER_THREAD);
		CHECK(!srq_seen[thread][seq]);
		srq_seen[thread][seq] = 1;
		EQ(seq, last[thread] + 1);
		last[thread] = seq;
		n++;
	}
	for (i = 0; i < 2; i++)
		OK(pthread_join(t[i], NULL));
	pair_close(&p);
}

static const struct test_case cases[] = {
	{"post", t_post},
	{"wr", t_wr},
	{"ex", t_ex},
	{"srq", t_srq},
	{"late", t_late},
	{"late-ex", t_late_ex},
};

int main(int argc, char **argv)
{
	return test_main(argc, argv, cases, ARRAY_SIZE(cases), 180);
}
