/* SPDX-License-Identifier: MIT */
/*
 * The device is removed while its queues are open. Each case creates a link (a dummy
 * interface with an rxe device) and removes it.
 *
 * rxe has no disassociation: the removal waits until the last process has closed the
 * device, which works until then. A kernel with disassociation reports
 * IBV_EVENT_DEVICE_FATAL and refuses all commands with EIO. The test accepts both,
 * but no hang and no crash.
 */
#include "common.h"

static struct pair p;
static char netdev[32], dev[32];
static bool disassociated;

static int sh(const char *fmt, const char *a, const char *b)
{
	char cmd[256];

	snprintf(cmd, sizeof(cmd), fmt, a, b);
	return system(cmd);
}

static void remove_link(void)
{
	sh("ip link del %s 2>/dev/null", netdev, "");
}

static void create_link(void)
{
	int i;

	snprintf(netdev, sizeof(netdev), "rvt%d", getpid() % 1000);
	snprintf(dev, sizeof(dev), "rvtrxe%d", getpid() % 1000);
	remove_link();
	if (sh("ip link add %s type dummy", netdev, "") ||
	    sh("ip addr add 10.199.7.1/24 dev %s && ip link set %s up", netdev,
	       netdev) ||
	    sh("rdma link add %s type rxe netdev %s", dev, netdev))
		SKIP("cannot create a link (root, rdma_rxe and iproute2?)");
	atexit(remove_link);
	for (i = 0; i < 100; i++) {
		if (!sh("grep -q ffff:0ac7:0701 /sys/class/infiniband/%s/ports/1/gids/*",
			dev, ""))
			return;
		sleep_ms(50);
	}
	FAIL("no GID on %s", dev);
}

static pid_t start_delete(const char *how)
{
	pid_t pid = fork();

	CHECK(pid >= 0);
	if (!pid) {
		/* Inherited descriptors would keep the device open. */
		int fd;

		for (fd = 3; fd < 256; fd++)
			close(fd);
		execl("/bin/sh", "sh", "-c", how, NULL);
		_exit(127);
	}
	return pid;
}

static bool wait_for_exit(pid_t pid, unsigned ms)
{
	double end = now_ms() + ms;
	int st;

	do {
		pid_t got = waitpid(pid, &st, WNOHANG);

		CHECK(got >= 0);
		if (got) {
			EQ(st, 0);
			return true;
		}
		sleep_ms(20);
	} while (now_ms() < end);
	return false;
}

static volatile int cq_woken, async_woken, fatal_seen;

static void *cq_waiter(void *arg)
{
	struct ibv_cq *cq;
	void *context;

	(void)arg;
	if (!ibv_get_cq_event(p.b.ch, &cq, &context)) {
		CHECK(cq == p.b.cq);
		ibv_ack_cq_events(cq, 1);
	}
	__atomic_store_n(&cq_woken, 1, __ATOMIC_SEQ_CST);
	return NULL;
}

static void *async_waiter(void *arg)
{
	struct ibv_async_event ev;

	(void)arg;
	if (!ibv_get_async_event(p.ctx, &ev)) {
		fprintf(stderr, "async event: %s\n",
			ibv_event_type_str(ev.event_type));
		if (ev.event_type == IBV_EVENT_DEVICE_FATAL)
			fatal_seen = 1;
		else if (ev.event_type == IBV_EVENT_PORT_ERR ||
			 ev.event_type == IBV_EVENT_GID_CHANGE)
			EQ(ev.element.port_num, 1);
		else
			FAIL("unexpected event %d", ev.event_type);
		ibv_ack_async_event(&ev);
	}
	__atomic_store_n(&async_woken, 1, __ATOMIC_SEQ_CST);
	return NULL;
}

static bool wait_for_flag(volatile int *flag, unsigned ms)
{
	double end = now_ms() + ms;

	while (!__atomic_load_n(flag, __ATOMIC_SEQ_CST) && now_ms() < end)
		sleep_ms(10);
	return __atomic_load_n(flag, __ATOMIC_SEQ_CST);
}

/* After disassociation a destroy may return EIO. */
static void check_destroy(int rc)
{
	if (rc && !(disassociated && rc == EIO))
		FAIL("destroy returned %d", rc);
}

static void close_all(void)
{
	int i;

	for (i = 0; i < 2; i++) {
		struct end *e = i ? &p.b : &p.a;

		check_destroy(ibv_destroy_qp(e->qp));
		if (e->srq)
			check_destroy(ibv_destroy_srq(e->srq));
		check_destroy(ibv_destroy_cq(e->cq));
		if (e->ch)
			check_destroy(ibv_destroy_comp_channel(e->ch));
		check_destroy(ibv_dereg_mr(e->mr));
	}
	check_destroy(ibv_dealloc_pd(p.pd));
	OK(ibv_close_device(p.ctx));
}

static void check_device_removed(void)
{
	struct ibv_device **list = MUST(ibv_get_device_list(NULL));
	int i;

	for (i = 0; list[i]; i++)
		if (!strcmp(ibv_get_device_name(list[i]), dev))
			FAIL("%s is still there", dev);
	ibv_free_device_list(list);
	/* Other devices still work. */
	if (getenv("RXE_DEV")) {
		struct pair q;
		struct op op;

		pair_open(&q, (struct pair_opts){.type = IBV_QPT_RC});
		op = op_on(&q.a, IBV_WR_SEND, 1, 0, 100);
		post_recv(&q.b, 2, 0, 100);
		POST_OK(&q.a, &op, 1, POST);
		EXPECT_WC(&q.a, 1, IBV_WC_SEND, 100);
		EXPECT_WC(&q.b, 2, IBV_WC_RECV, 100);
		pair_close(&q);
	}
}

/* Removal with posted receives and two threads that sleep in the library. */
static void unplug(const char *fmt, bool traffic)
{
	pthread_t cqt, at;
	struct ibv_wc wc;
	char how[128];
	int i, flushed = 0;
	pid_t del;

	create_link();
	pair_open_on(&p, open_device_named(dev),
		     (struct pair_opts){.type = IBV_QPT_RC, .events = true});
	for (i = 0; i < 20; i++)
		post_recv(&p.b, 100 + i, 0, 1000);
	if (traffic) {
		struct op op[5];

		for (i = 0; i < 5; i++)
			op[i] = op_on(&p.a, IBV_WR_SEND, i, 0, 900);
		POST_OK(&p.a, op, 5, POST);
		for (i = 0; i < 5; i++) {
			EXPECT_WC(&p.a, i, IBV_WC_SEND, 900);
			EXPECT_WC(&p.b, 100 + i, IBV_WC_RECV, 900);
		}
	}
	OK(ibv_req_notify_cq(p.b.cq, 0));
	OK(pthread_create(&cqt, NULL, cq_waiter, NULL));
	OK(pthread_create(&at, NULL, async_waiter, NULL));
	sleep_ms(100);
	snprintf(how, sizeof(how), fmt, strstr(fmt, "rdma") ? dev : netdev);
	del = start_delete(how);
	disassociated = wait_for_exit(del, 2000) && wait_for_flag(&fatal_seen, 2000);
	fprintf(stderr, "%s: %s\n", how,
		disassociated ? "disassociated" : "waits for this process");
	/* No call hangs. */
	{
		struct ibv_device_attr attr;
		struct ibv_port_attr port;
		int rc = ibv_query_device(p.ctx, &attr);

		CHECK(disassociated ? rc == EIO : rc == 0);
		ibv_query_port(p.ctx, 1, &port);
	}
	if (traffic) {
		/* The send may fail, but must not crash or hang. */
		struct op op = op_on(&p.a, IBV_WR_SEND, 50, 0, 100);

		(void)post_ops(&p.a, &op, 1, POST, NULL);
		poll_wait(p.a.cq, &wc, 200);
	}
	if (!disassociated) {
		qp_to(p.b.qp, IBV_QPS_ERR);
		while (poll_wait(p.b.cq, &wc, 300))
			flushed += wc.status == IBV_WC_WR_FLUSH_ERR;
		CHECK(flushed >= (traffic ? 14 : 20));
	}
	if (!wait_for_flag(&cq_woken, 3000))
		FAIL("a thread still sleeps in ibv_get_cq_event");
	OK(pthread_join(cqt, NULL));
	if (!wait_for_flag(&async_woken, 500)) {
		/* rxe reports no event of the removal, but one of the interface. */
		sh("ip link set %s down 2>/dev/null", netdev, "");
		if (!wait_for_flag(&async_woken, 3000))
			FAIL("a thread still sleeps in ibv_get_async_event");
	}
	OK(pthread_join(at, NULL));
	close_all();
	if (!disassociated && !wait_for_exit(del, 10000))
		FAIL("the removal still waits, although the device is closed");
	check_device_removed();
	remove_link();
}

static void t_rdma_link(void)
{
	unplug("rdma link delete %s", false);
}

static void t_rdma_link_traffic(void)
{
	unplug("rdma link delete %s", true);
}

static void t_netdev(void)
{
	unplug("ip link del %s", true);
}

/* The removal completes when the process with the open device is killed. */
static void t_killed(void)
{
	char how[128];
	int sv[2], st;
	pid_t holder, del;
	char c;

	create_link();
	CHECK(!pipe(sv));
	holder = fork();
	CHECK(holder >= 0);
	if (!holder) {
		pair_open_on(&p, open_device_named(dev),
			     (struct pair_opts){.type = IBV_QPT_RC});
		post_recv(&p.b, 1, 0, 64);
		CHECK(write(sv[1], "x", 1) == 1);
		for (;;) {
			struct op op = op_on(&p.a, IBV_WR_RDMA_WRITE, 1, 0, 8);

			op.remote = (uintptr_t)p.b.buf;
			op.rkey = p.b.mr->rkey;
			op.flags = 0;
			(void)post_ops(&p.a, &op, 1, POST, NULL);
		}
	}
	CHECK(read(sv[0], &c, 1) == 1);
	snprintf(how, sizeof(how), "rdma link delete %s", dev);
	del = start_delete(how);
	disassociated = wait_for_exit(del, 500);
	CHECK(!kill(holder, SIGKILL));
	CHECK(waitpid(holder, &st, 0) == holder);
	if (!disassociated && !wait_for_exit(del, 10000))
		FAIL("the removal still waits, although the process is dead");
	check_device_removed();
	remove_link();
}

static const struct test_case cases[] = {
	{"rdma-link", t_rdma_link},
	{"rdma-link-traffic", t_rdma_link_traffic},
	{"netdev", t_netdev},
	{"killed", t_killed},
};

int main(int argc, char **argv)
{
	return test_main(argc, argv, cases, ARRAY_SIZE(cases), 60);
}
