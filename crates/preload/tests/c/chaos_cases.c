/*
 * Relies on what the specification does not promise, by the first argument; with a second
 * argument, does the same as it should be done. Queue pairs a and c send to b and d.
 */
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>

#include "check.h"
#include "loopback.h"

#define PACKET 1024
#define LENGTH (4 * PACKET)

static char memory[LENGTH], other[LENGTH], target[LENGTH], other_target[LENGTH];
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq, *receives;
static struct ibv_mr *mr, *other_mr, *target_mr, *other_target_mr;
static struct ibv_qp *a, *b, *c, *d;
static int right;

static struct ibv_qp_attr rights = {
	.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
			   IBV_ACCESS_REMOTE_ATOMIC,
	.timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .min_rnr_timer = 1,
};

static struct ibv_mr *region(char *bytes)
{
	struct ibv_mr *made = ibv_reg_mr(pd, bytes, LENGTH, IBV_ACCESS_LOCAL_WRITE |
			IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
			IBV_ACCESS_REMOTE_ATOMIC);

	CHECK(made);
	return made;
}

static struct ibv_qp *queue_pair(struct ibv_cq *sends, struct ibv_cq *received)
{
	struct ibv_qp_init_attr ask = {
		.send_cq = sends, .recv_cq = received, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1,
			 .max_recv_sge = 1 },
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &ask);

	CHECK(qp);
	return qp;
}

static void post(struct ibv_qp *qp, enum ibv_wr_opcode opcode, struct ibv_mr *from,
		 struct ibv_mr *to, int length, int flags)
{
	struct ibv_sge sge = { (uintptr_t)from->addr, length, from->lkey };
	struct ibv_send_wr *bad, wr = {
		.wr_id = qp->qp_num, .sg_list = &sge, .num_sge = 1, .opcode = opcode,
		.send_flags = flags,
	};

	wr.wr.rdma.remote_addr = (uintptr_t)to->addr;
	wr.wr.rdma.rkey = to->rkey;
	if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = (uintptr_t)to->addr;
		wr.wr.atomic.compare_add = 1;
		wr.wr.atomic.rkey = to->rkey;
	}
	CHECK(!ibv_post_send(qp, &wr, &bad));
}

static void write_to(struct ibv_qp *qp, struct ibv_mr *from, struct ibv_mr *to, int length,
		     int flags)
{
	post(qp, IBV_WR_RDMA_WRITE, from, to, length, flags);
}

static void receive(struct ibv_qp *qp, struct ibv_mr *into)
{
	struct ibv_sge sge = { (uintptr_t)into->addr, LENGTH, into->lkey };
	struct ibv_recv_wr *bad, wr = { .wr_id = qp->qp_num, .sg_list = &sge, .num_sge = 1 };

	CHECK(!ibv_post_recv(qp, &wr, &bad));
}

static struct ibv_wc poll_one(struct ibv_cq *from)
{
	struct ibv_wc wc;
	int found;

	while (!(found = ibv_poll_cq(from, 1, &wc)))
		;
	CHECK(found == 1 && wc.status == IBV_WC_SUCCESS);
	return wc;
}

/* What the program does in the meantime: long enough for any idle device. */
static void do_other_work(void)
{
	usleep(20000);
}

/* The buffer of an unsignaled write is free when a later one of another queue pair is complete. */
static void reuse(void)
{
	memset(memory, 1, LENGTH);
	write_to(a, mr, target_mr, LENGTH, right ? IBV_SEND_SIGNALED : 0);
	write_to(c, other_mr, other_target_mr, 64, IBV_SEND_SIGNALED);
	if (right)
		poll_one(cq);
	poll_one(cq);
	memset(memory, 2, LENGTH);
	write_to(a, other_mr, other_target_mr, 64, IBV_SEND_SIGNALED);
	poll_one(cq);
	CHECK(target[0] == 1 && target[LENGTH - 1] == 1);
}

/* Completions of two queue pairs come in the order of their posts. */
static void order(void)
{
	struct ibv_wc first, second;

	write_to(a, mr, target_mr, 64, IBV_SEND_SIGNALED);
	usleep(100);
	write_to(c, other_mr, other_target_mr, 64, IBV_SEND_SIGNALED);
	first = poll_one(cq);
	second = poll_one(cq);
	CHECK(right || (first.wr_id == a->qp_num && second.wr_id == c->qp_num));
}

/* A message has arrived when its last byte has. */
static void last_byte(void)
{
	memset(memory, 1, LENGTH);
	write_to(a, mr, target_mr, LENGTH, IBV_SEND_SIGNALED);
	while (!*(volatile char *)&target[LENGTH - 1])
		;
	if (right)
		poll_one(cq);
	for (int n = 0; n < LENGTH - PACKET; n += 64)
		CHECK(*(volatile char *)&target[n] == 1);
}

/* A failed completion says whether it is of a send. */
static void opcode(void)
{
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	int sends = 0;

	CHECK(!ibv_modify_qp(a, &error, IBV_QP_STATE));
	for (int n = 0; n < 4; n++)
		write_to(a, mr, target_mr, 64, IBV_SEND_SIGNALED);
	for (int n = 0; n < 4;) {
		struct ibv_wc wc = { 0 };
		int found = ibv_poll_cq(cq, 1, &wc);

		CHECK(found >= 0 && wc.status == (found ? IBV_WC_WR_FLUSH_ERR : 0));
		n += found;
		if (found)
			sends += right ? wc.wr_id == a->qp_num : !(wc.opcode & IBV_WC_RECV);
	}
	CHECK(sends == 4);
}

/* Each completion has an event. */
static void event(void)
{
	struct ibv_wc wc;
	void *data;
	int found = 0, polled;

	CHECK(!ibv_req_notify_cq(cq, 0));
	write_to(a, mr, target_mr, 64, IBV_SEND_SIGNALED);
	write_to(c, other_mr, other_target_mr, 64, IBV_SEND_SIGNALED);
	while (found < 2) {
		CHECK(!ibv_get_cq_event(channel, &cq, &data));
		ibv_ack_cq_events(cq, 1);
		CHECK(!ibv_req_notify_cq(cq, 0));
		do {
			polled = ibv_poll_cq(cq, 1, &wc);
			CHECK(polled >= 0);
			found += polled;
		} while (right && polled);
	}
}

/* A buffer that was posted twice is free at the first completion. */
static void first_completion(void)
{
	memset(memory, 1, LENGTH);
	write_to(a, mr, target_mr, LENGTH, IBV_SEND_SIGNALED);
	write_to(c, mr, other_target_mr, LENGTH, IBV_SEND_SIGNALED);
	do_other_work();
	poll_one(cq);
	if (right)
		poll_one(cq);
	memset(memory, 2, LENGTH);
	if (!right)
		poll_one(cq);
	CHECK(target[LENGTH - 1] == 1 && other_target[LENGTH - 1] == 1);
}

/* What has been sent long ago is complete, and one poll returns it all. */
static void poll_all(void)
{
	struct ibv_wc wc[4];
	int found = 0;

	for (int n = 0; n < 4; n++)
		write_to(a, mr, target_mr, 64, IBV_SEND_SIGNALED);
	/* On a busy machine a device that does nothing late takes longer than for others. */
	for (int n = 0; n < 2; n++)
		do_other_work();
	do {
		found += ibv_poll_cq(cq, 4, wc);
	} while (right && found < 4);
	CHECK(found == 4);
}

/* The number of a new queue pair is not that of an old one. */
static void number(void)
{
	struct ibv_qp *made;
	uint32_t old = a->qp_num;

	CHECK(!ibv_destroy_qp(a));
	made = queue_pair(cq, receives);
	CHECK(right || made->qp_num != old);
}

/* The first message comes after the event that the connection is established. */
static void established(void)
{
	struct ibv_async_event found;
	struct ibv_qp_attr attr = rights;
	struct ibv_qp *server = queue_pair(cq, receives), *client = queue_pair(cq, receives);
	int flags = fcntl(context->async_fd, F_GETFL);

	CHECK(!fcntl(context->async_fd, F_SETFL, flags | O_NONBLOCK));
	connect_to(client, server->qp_num, attr);
	/* As far as RTR. */
	attr.qp_state = IBV_QPS_INIT;
	attr.port_num = 1;
	CHECK(!ibv_modify_qp(server, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
					    IBV_QP_ACCESS_FLAGS));
	receive(server, target_mr);
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = IBV_MTU_1024;
	attr.dest_qp_num = client->qp_num;
	attr.max_dest_rd_atomic = 1;
	attr.ah_attr.port_num = 1;
	attr.ah_attr.is_global = 1;
	CHECK(!ibv_query_gid(context, 1, 0, &attr.ah_attr.grh.dgid));
	CHECK(!ibv_modify_qp(server, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
					    IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	post(client, IBV_WR_SEND, mr, target_mr, 64, 0);
	poll_one(receives);
	do_other_work();
	if (right)
		return;
	CHECK(!ibv_get_async_event(context, &found));
	CHECK(found.event_type == IBV_EVENT_COMM_EST);
	ibv_ack_async_event(&found);
}

/* The result of an atomic operation is there after a while. */
static void result(void)
{
	uint64_t before = 41;

	memcpy(target, &before, 8);
	post(a, IBV_WR_ATOMIC_FETCH_AND_ADD, mr, target_mr, 8, IBV_SEND_SIGNALED);
	do_other_work();
	if (right)
		poll_one(cq);
	CHECK(*(volatile uint64_t *)memory == 41);
}

/* A request is complete before its reply arrives. */
static void reply(void)
{
	struct ibv_wc first, second;

	receive(b, target_mr);
	receive(a, mr);
	post(a, IBV_WR_SEND, other_mr, target_mr, 64, IBV_SEND_SIGNALED);
	poll_one(receives);
	post(b, IBV_WR_SEND, other_target_mr, target_mr, 64, 0);
	first = poll_one(cq);
	second = poll_one(cq);
	CHECK(right || (first.opcode == IBV_WC_SEND && second.opcode == IBV_WC_RECV));
}

static const struct {
	const char *name;
	void (*run)(void);
} cases[] = {
	{ "reuse", reuse },
	{ "order", order },
	{ "last-byte", last_byte },
	{ "opcode", opcode },
	{ "event", event },
	{ "first-completion", first_completion },
	{ "poll-all", poll_all },
	{ "number", number },
	{ "established", established },
	{ "result", result },
	{ "reply", reply },
};

int main(int argc, char **argv)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);

	CHECK(argc > 1 && devices && devices[0]);
	right = argc > 2;
	context = ibv_open_device(devices[0]);
	CHECK(context && (pd = ibv_alloc_pd(context)));
	CHECK((channel = ibv_create_comp_channel(context)));
	CHECK((cq = ibv_create_cq(context, 64, NULL, channel, 0)));
	CHECK((receives = ibv_create_cq(context, 64, NULL, NULL, 0)));
	mr = region(memory);
	other_mr = region(other);
	target_mr = region(target);
	other_target_mr = region(other_target);
	a = queue_pair(cq, cq);
	b = queue_pair(receives, receives);
	c = queue_pair(cq, receives);
	d = queue_pair(receives, receives);
	connect_to(a, b->qp_num, rights);
	connect_to(b, a->qp_num, rights);
	connect_to(c, d->qp_num, rights);
	connect_to(d, c->qp_num, rights);
	for (size_t n = 0; n < sizeof(cases) / sizeof(*cases); n++)
		if (!strcmp(cases[n].name, argv[1])) {
			cases[n].run();
			return 0;
		}
	return 2;
}
