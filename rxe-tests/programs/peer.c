/* SPDX-License-Identifier: MIT */
/* Two processes, one of which is killed during a transfer. */
#include "common.h"

#include <sys/socket.h>

struct hello {
	uint32_t qpn, rkey;
	uint64_t addr;
};

static struct end e;
static struct pair_opts opts = {.type = IBV_QPT_RC,
				.events = true,
				.timeout = 14,
				.retry = 6,
				.min_rnr = 1};

static void must_write(int fd, const void *buf, size_t n)
{
	CHECK(write(fd, buf, n) == (ssize_t)n);
}

static void must_read(int fd, void *buf, size_t n)
{
	CHECK(read(fd, buf, n) == (ssize_t)n);
}

static struct hello connect_to_peer(int fd)
{
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = MUST(ibv_alloc_pd(ctx));
	struct hello mine, theirs;
	union ibv_gid gid;
	char c = 0;

	OK(ibv_query_gid(ctx, 1, gid_index(ctx), &gid));
	end_open(&e, ctx, pd, &opts, false);
	mine = (struct hello){e.qp->qp_num, e.mr->rkey, (uintptr_t)e.buf};
	must_write(fd, &mine, sizeof(mine));
	must_read(fd, &theirs, sizeof(theirs));
	end_connect(&e, &opts, theirs.qpn, &gid);
	must_write(fd, &c, 1);
	must_read(fd, &c, 1);
	return theirs;
}

static void close_end(void)
{
	struct ibv_context *ctx = e.ctx;
	struct ibv_pd *pd = e.pd;

	end_close(&e);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
}

/* The peer of t_killed_sender. */
static void endless_sender(int fd)
{
	struct hello to = connect_to_peer(fd);
	uint64_t id = 0;
	struct ibv_wc wc;

	for (;;) {
		struct op op = op_on(&e, IBV_WR_RDMA_WRITE_WITH_IMM, id, 0,
				     60000);
		int rc;

		op.remote = to.addr;
		op.rkey = to.rkey;
		rc = post_ops(&e, &op, 1, POST, NULL);
		if (!rc)
			id++;
		else
			EQ(rc, ENOMEM);
		while (ibv_poll_cq(e.cq, 1, &wc) == 1)
			EQ(wc.status, IBV_WC_SUCCESS);
	}
}

/* The peer of t_killed_receiver. */
static void endless_receiver(int fd)
{
	struct ibv_wc wc;

	connect_to_peer(fd);
	for (;;) {
		struct ibv_sge sge = sge_on(&e, 0, 60000);

		try_recv(&e, 0, &sge, 1);
		while (ibv_poll_cq(e.cq, 1, &wc) == 1)
			EQ(wc.status, IBV_WC_SUCCESS);
	}
}

static pid_t spawn(void (*peer)(int), int *fd)
{
	int sv[2];
	pid_t pid;

	CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, sv));
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		close(sv[0]);
		test_limit(60); /* if it is not killed */
		peer(sv[1]);
		_exit(0);
	}
	close(sv[1]);
	*fd = sv[0];
	return pid;
}

/*
 * The receiver continues: received messages are complete, and its receives are
 * flushed when it enters ERR.
 */
static void t_killed_sender(void)
{
	uint64_t posted = 0, next = 0;
	struct ibv_cq *cq;
	void *context;
	struct ibv_wc wc;
	pid_t pid;
	int fd, st;

	pid = spawn(endless_sender, &fd);
	connect_to_peer(fd);
	while (posted < 60)
		post_recv(&e, posted++, 0, 64);
	while (next < 100) {
		wc = POLL(e.cq);
		EQ(wc.status, IBV_WC_SUCCESS);
		EQ(wc.wr_id, next);
		EQ(wc.byte_len, 60000);
		next++;
		post_recv(&e, posted++, 0, 64);
	}
	CHECK(!kill(pid, SIGKILL));
	CHECK(waitpid(pid, &st, 0) == pid);
	while (poll_wait(e.cq, &wc, 300)) {
		if (wc.status != IBV_WC_SUCCESS)
			break;
		EQ(wc.wr_id, next);
		next++;
	}
	OK(ibv_req_notify_cq(e.cq, 0));
	qp_to(e.qp, IBV_QPS_ERR);
	CHECK(fd_readable(e.ch->fd, 5000));
	CHECK(!ibv_get_cq_event(e.ch, &cq, &context));
	CHECK(cq == e.cq && context == &e);
	ibv_ack_cq_events(cq, 1);
	while (next < posted) {
		wc = POLL(e.cq);
		check_status(__FILE__, __LINE__, &wc, next,
			     ONLY(IBV_WC_WR_FLUSH_ERR), e.qp->qp_num);
		next++;
	}
	EXPECT_NO_WC(e.cq);
	close_end();
}

/*
 * The sender continues: the unacknowledged request fails with retries exceeded,
 * and the following ones are flushed in order.
 */
static void t_killed_receiver(void)
{
	uint64_t posted = 0, next = 0;
	bool failed = false;
	struct ibv_wc wc;
	pid_t pid;
	int fd, st, i;

	pid = spawn(endless_receiver, &fd);
	connect_to_peer(fd);
	while (next < 100) {
		while (posted - next < 40) {
			struct op op = op_on(&e, IBV_WR_SEND, posted, 0, 50000);

			POST_OK(&e, &op, 1, POST);
			posted++;
		}
		wc = POLL(e.cq);
		check_wc(__FILE__, __LINE__, &wc, next, IBV_WC_SEND, 50000,
			 e.qp->qp_num, 0, 0, 0);
		next++;
	}
	CHECK(!kill(pid, SIGKILL));
	CHECK(waitpid(pid, &st, 0) == pid);
	for (i = 0; i < 3; i++) { /* these cannot arrive */
		struct op op = op_on(&e, IBV_WR_SEND, posted++, 0, 50000);

		POST_OK(&e, &op, 1, POST);
	}
	while (next < posted) {
		wc = POLL(e.cq);
		EQ(wc.wr_id, next);
		EQ(wc.qp_num, e.qp->qp_num);
		if (!failed && wc.status != IBV_WC_SUCCESS) {
			EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
			failed = true;
		} else if (failed) {
			EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
		}
		next++;
	}
	CHECK(failed);
	EQ(qp_state(e.qp), IBV_QPS_ERR);
	EXPECT_NO_WC(e.cq);
	close_end();
}

static const struct test_case cases[] = {
	{"killed-sender", t_killed_sender},
	{"killed-receiver", t_killed_receiver},
};

int main(int argc, char **argv)
{
	return test_main(argc, argv, cases, ARRAY_SIZE(cases), 90);
}
