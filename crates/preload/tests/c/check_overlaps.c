/*
 * As check_cases.c: two accesses to the same bytes that are not ordered. Queue pair a is connected
 * with b, c with d. The first send of a finds no receive, so that what follows it waits.
 */
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "check.h"
#include "loopback.h"

#define LENGTH 65536

/* What another process tells of itself. */
struct other {
	uint32_t numbers[2];
	uint32_t key;
	uint64_t address;
	union ibv_gid gid;
	uint16_t lid;
};

static char memory[LENGTH] __attribute__((aligned(4096)));
static char target[LENGTH] __attribute__((aligned(4096)));
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq, *receives;
static struct ibv_mr *mr, *target_mr;
static struct ibv_qp *a, *b, *c, *d;
static uint64_t remote;
static uint32_t remote_key;
static int right, to_peer, turns = 10;

static struct ibv_qp_attr rights = {
	.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
	.timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .min_rnr_timer = 26,
};

static struct ibv_qp *queue_pair(void)
{
	struct ibv_qp_init_attr_ex ask = {
		.send_cq = cq, .recv_cq = receives, .qp_type = IBV_QPT_RC, .pd = pd,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2,
			 .max_recv_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE,
	};
	struct ibv_qp *qp = ibv_create_qp_ex(context, &ask);

	CHECK(qp);
	return qp;
}

static void poll_one(struct ibv_cq *from)
{
	struct ibv_wc wc;

	while (!ibv_poll_cq(from, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_SUCCESS);
}

static void receive(struct ibv_qp *qp, char *into)
{
	struct ibv_sge list = { (uintptr_t)into, 128, (qp == c ? mr : target_mr)->lkey };
	struct ibv_recv_wr wr = { .sg_list = &list, .num_sge = 1 }, *bad;

	CHECK(!ibv_post_recv(qp, &wr, &bad));
}

/* Lets the send queue of a wait. */
static void stop(void)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND }, *bad;
	struct ibv_wc wc;

	CHECK(!ibv_post_send(a, &wr, &bad));
	for (int n = 0; n < turns; n++) {
		CHECK(!ibv_poll_cq(cq, 1, &wc));
		usleep(200);
	}
}

/* Lets it go on, and polls its next completion. */
static void go_on(void)
{
	if (b)
		receive(b, target + LENGTH / 2);
	else
		CHECK(write(to_peer, "", 1) == 1);
	poll_one(cq);
}

/* Posts an access of 128 bytes, in two elements, from or to an offset of `memory` and of the
 * remote memory. */
static void post(struct ibv_qp *qp, enum ibv_wr_opcode opcode, int at, int remote_at)
{
	struct ibv_sge list[2] = { { (uintptr_t)memory + at, 64, mr->lkey },
				   { (uintptr_t)memory + at + 64, 64, mr->lkey } };
	struct ibv_send_wr wr = { .wr_id = qp == a ? 0xa : 0xc, .sg_list = list, .num_sge = 2,
				  .opcode = opcode, .send_flags = IBV_SEND_SIGNALED }, *bad;

	wr.wr.rdma.remote_addr = remote + remote_at;
	wr.wr.rdma.rkey = remote_key;
	CHECK(!ibv_post_send(qp, &wr, &bad));
}

static void build(struct ibv_qp *qp, int at)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);

	ibv_wr_start(ex);
	ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_write(ex, remote_key, remote);
	ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory + at, 128);
	CHECK(!ibv_wr_complete(ex));
}

/* Posts the second access to the same bytes, after the first one or, if that is right, after its
 * completion was polled. */
static void second(enum ibv_wr_opcode opcode, int remote_at)
{
	if (right) {
		go_on();
	}
	if (opcode == IBV_WR_DRIVER1)
		build(c, 4096);
	else
		post(c, opcode, 4096, remote_at);
	poll_one(cq);
	if (!right) {
		go_on();
	}
}

static void *read_in_thread(void *unused)
{
	post(c, IBV_WR_RDMA_READ, 4096, 0);
	poll_one(cq);
	return unused;
}

/* Lets d send, or write, to the buffer of a send of a. */
static void arrive(enum ibv_wr_opcode opcode, int at)
{
	struct ibv_sge list = { (uintptr_t)target, 128, target_mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &list, .num_sge = 1, .opcode = opcode,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;

	target[7] = 7;
	if (at < 0)
		list.length = 8;
	if (opcode == IBV_WR_SEND)
		receive(c, memory + (right ? 4096 : at));
	wr.wr.rdma.remote_addr = (uintptr_t)memory + (right ? 4096 : at < 0 ? 0 : at);
	wr.wr.rdma.rkey = mr->rkey;
	post(a, IBV_WR_RDMA_WRITE, 0, 0);
	CHECK(!ibv_post_send(d, &wr, &bad));
	poll_one(cq);
	go_on();
}

static void connect_with(struct ibv_qp *qp, const struct other *other, int index)
{
	struct ibv_qp_attr attr = rights;

	attr.qp_state = IBV_QPS_INIT;
	attr.port_num = 1;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
					IBV_QP_ACCESS_FLAGS));
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = IBV_MTU_1024;
	attr.dest_qp_num = other->numbers[index];
	attr.max_dest_rd_atomic = attr.max_rd_atomic = 1;
	attr.ah_attr.port_num = 1;
	attr.ah_attr.dlid = other->lid;
	attr.ah_attr.is_global = 1;
	attr.ah_attr.grh.dgid = other->gid;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
					IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT |
					IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					IBV_QP_MAX_QP_RD_ATOMIC));
}

static void open_all(void)
{
	const int all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
	struct ibv_device **devices = ibv_get_device_list(NULL);

	CHECK(devices && devices[0]);
	context = ibv_open_device(devices[0]);
	CHECK(context);
	pd = ibv_alloc_pd(context);
	CHECK(pd);
	mr = ibv_reg_mr(pd, memory, LENGTH, all);
	target_mr = ibv_reg_mr(pd, target, LENGTH, all);
	cq = ibv_create_cq(context, 32, NULL, NULL, 0);
	receives = ibv_create_cq(context, 32, NULL, NULL, 0);
	CHECK(mr && target_mr && cq && receives);
	a = queue_pair();
	c = queue_pair();
}

static void close_all(void)
{
	CHECK(!ibv_destroy_qp(a) && !ibv_destroy_qp(c));
	CHECK(!ibv_dereg_mr(mr) && !ibv_dereg_mr(target_mr));
	CHECK(!ibv_destroy_cq(cq) && !ibv_destroy_cq(receives) && !ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(context));
}

/* Tells the other process of this one, and connects with it. */
static void meet(int in, int out, struct other *other)
{
	struct other own = { .numbers = { a->qp_num, c->qp_num }, .key = target_mr->rkey,
			     .address = (uintptr_t)target };
	struct ibv_port_attr port;

	CHECK(!ibv_query_port(context, 1, &port));
	CHECK(!ibv_query_gid(context, 1, 0, &own.gid));
	own.lid = port.lid;
	CHECK(write(out, &own, sizeof(own)) == sizeof(own));
	CHECK(read(in, other, sizeof(*other)) == sizeof(*other));
	connect_with(a, other, 0);
	connect_with(c, other, 1);
	CHECK(write(out, "", 1) == 1 && read(in, &own, 1) == 1);
}

/* The memory is another process's. */
static void between_processes(void)
{
	int to[2], from[2], status, got;
	struct other other;
	struct ibv_wc wc;
	char end;
	pid_t child;

	/* The other process may be late: it is given time to refuse the first send, three times. */
	turns = 100;
	rights.min_rnr_timer = 28;
	CHECK(!pipe(to) && !pipe(from));
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		close(to[1]);
		open_all();
		meet(to[0], from[1], &other);
		CHECK(!fcntl(to[0], F_SETFL, O_NONBLOCK));
		/* Until the parent has ended. */
		while ((got = read(to[0], &end, 1))) {
			if (got == 1)
				receive(a, target + LENGTH / 2);
			ibv_poll_cq(receives, 1, &wc);
		}
		close_all();
		_exit(0);
	}
	close(to[0]);
	open_all();
	meet(from[0], to[1], &other);
	to_peer = to[1];
	remote = other.address;
	remote_key = other.key;
	memory[4096] = 1;
	for (int n = 0; n < (right ? 1 : 3); n++) {
		stop();
		post(a, IBV_WR_RDMA_WRITE, 0, 0);
		second(IBV_WR_RDMA_WRITE, 0);
	}
	close(to[1]);
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	close_all();
}

int main(int count, char **arguments)
{
	const char *mistake = arguments[1];

	CHECK(count >= 2);
	right = count > 2;
	if (!strcmp(mistake, "between-processes")) {
		between_processes();
		return 0;
	}
	open_all();
	b = queue_pair();
	d = queue_pair();
	connect_to(a, b->qp_num, rights);
	connect_to(b, a->qp_num, rights);
	connect_to(c, d->qp_num, rights);
	connect_to(d, c->qp_num, rights);
	remote = (uintptr_t)target;
	remote_key = target_mr->rkey;
	memory[4096 + 100] = 1;
	if (strcmp(mistake, "seen"))
		stop();

	if (!strcmp(mistake, "write-write")) {
		post(a, IBV_WR_RDMA_WRITE, 0, 0);
		second(IBV_WR_RDMA_WRITE, 0);
	} else if (!strcmp(mistake, "write-write-part")) {
		/* From the second element of the first one on. */
		post(a, IBV_WR_RDMA_WRITE, 0, 0);
		memory[4096] = 1;
		second(IBV_WR_RDMA_WRITE, 100);
	} else if (!strcmp(mistake, "write-write-builder")) {
		build(a, 0);
		second(IBV_WR_DRIVER1, 0);
	} else if (!strcmp(mistake, "read-write")) {
		post(a, IBV_WR_RDMA_WRITE, 0, 0);
		go_on();
		stop();
		target[100] = 5;
		post(a, IBV_WR_RDMA_READ, 0, 100);
		memory[4096] = 6;
		/* The read gets what this has written; the other one of c, that it comes late. */
		if (right) {
			second(IBV_WR_RDMA_WRITE, 100);
		} else {
			post(c, IBV_WR_RDMA_WRITE, 4096, 100);
			poll_one(cq);
			target[100] = 5;
			go_on();
		}
	} else if (!strcmp(mistake, "write-read")) {
		memory[5] = 5;
		post(a, IBV_WR_RDMA_WRITE, 0, 0);
		second(IBV_WR_RDMA_READ, 0);
	} else if (!strcmp(mistake, "message-into-send")) {
		arrive(IBV_WR_SEND, 64);
	} else if (!strcmp(mistake, "write-into-send")) {
		arrive(IBV_WR_RDMA_WRITE, 64);
	/* What follows is right in either case. */
	} else if (!strcmp(mistake, "same-bytes")) {
		memory[4096 + 100] = 0;
		post(a, IBV_WR_RDMA_WRITE, 0, 0);
		second(IBV_WR_RDMA_WRITE, 0);
	} else if (!strcmp(mistake, "beside")) {
		post(a, IBV_WR_RDMA_WRITE, 0, 0);
		second(IBV_WR_RDMA_WRITE, 128);
	} else if (!strcmp(mistake, "one-queue-pair")) {
		post(a, IBV_WR_RDMA_WRITE, 0, 0);
		post(a, IBV_WR_RDMA_WRITE, 4096, 0);
		go_on();
		poll_one(cq);
	} else if (!strcmp(mistake, "seen")) {
		/* The first one's end is seen in memory, and its completion is polled later. */
		volatile char *last = target + 127;

		memory[127] = 1;
		post(a, IBV_WR_RDMA_WRITE, 0, 0);
		while (!*last)
			;
		post(c, IBV_WR_RDMA_WRITE, 4096, 0);
		poll_one(cq);
		poll_one(cq);
	} else if (!strcmp(mistake, "read-by-thread")) {
		pthread_t thread;

		memory[5] = 5;
		post(a, IBV_WR_RDMA_WRITE, 0, 0);
		CHECK(!pthread_create(&thread, NULL, read_in_thread, NULL));
		CHECK(!pthread_join(thread, NULL));
		go_on();
	} else if (!strcmp(mistake, "flag-into-send")) {
		arrive(IBV_WR_RDMA_WRITE, -1);
	} else if (!strcmp(mistake, "never")) {
		/* The first one is never carried out. */
		post(a, IBV_WR_RDMA_WRITE, 0, 0);
		post(c, IBV_WR_RDMA_WRITE, 4096, 0);
		poll_one(cq);
	} else {
		CHECK(!"known");
	}
	CHECK(!ibv_destroy_qp(b) && !ibv_destroy_qp(d));
	close_all();
	return 0;
}
