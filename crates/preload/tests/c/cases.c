/*
 * Small cases with a known right answer, from public reports: `cases NAME`. `keys` needs two
 * devices of one network, `results` and `device-memory` MLX5_CQE_SIZE=128.
 */
#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>

#include "check.h"
#include "loopback.h"

enum { SIZE = 4096, RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
			     IBV_ACCESS_REMOTE_READ };

struct side {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	char memory[SIZE];
};

extern char **environ;

static const struct ibv_qp_attr attributes = {
	.qp_access_flags = RIGHTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
	.min_rnr_timer = 1,
};

static struct side *open_side(int index)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct side *it = aligned_alloc(SIZE, (sizeof(*it) + SIZE - 1) / SIZE * SIZE);

	CHECK(it && devices && devices[0] && devices[index]);
	CHECK(it->context = ibv_open_device(devices[index]));
	CHECK(it->pd = ibv_alloc_pd(it->context));
	CHECK(it->mr = ibv_reg_mr(it->pd, it->memory, SIZE, RIGHTS));
	CHECK(it->cq = ibv_create_cq(it->context, 16, NULL, NULL, 0));
	struct ibv_qp_init_attr init = {
		.send_cq = it->cq, .recv_cq = it->cq, .cap = { 8, 8, 1, 1 },
		.qp_type = IBV_QPT_RC, .sq_sig_all = 1,
	};
	CHECK(it->qp = ibv_create_qp(it->pd, &init));
	return it;
}

/* Connects queue pairs of two devices. */
static void connect_sides(struct side *a, struct side *b)
{
	for (int back = 0; back < 2; back++) {
		struct side *from = back ? b : a, *to = back ? a : b;
		struct ibv_qp_attr attr = attributes;
		struct ibv_port_attr port;

		CHECK(!ibv_query_port(to->context, 1, &port));
		attr.qp_state = IBV_QPS_INIT;
		attr.port_num = 1;
		CHECK(!ibv_modify_qp(from->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX |
						      IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
		attr.qp_state = IBV_QPS_RTR;
		attr.path_mtu = IBV_MTU_1024;
		attr.dest_qp_num = to->qp->qp_num;
		attr.max_dest_rd_atomic = 1;
		attr.ah_attr.port_num = 1;
		attr.ah_attr.dlid = port.lid;
		attr.ah_attr.is_global = 1;
		CHECK(!ibv_query_gid(to->context, 1, 0, &attr.ah_attr.grh.dgid));
		CHECK(!ibv_modify_qp(from->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
					IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
		attr.qp_state = IBV_QPS_RTS;
		attr.max_rd_atomic = 1;
		CHECK(!ibv_modify_qp(from->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN |
					IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					IBV_QP_MAX_QP_RD_ATOMIC));
	}
}

static struct ibv_wc transfer(struct side *from, enum ibv_wr_opcode opcode, uint64_t local,
			      uint32_t lkey, uint64_t remote, uint32_t rkey, int length)
{
	struct ibv_sge sge = { local, length, lkey };
	struct ibv_send_wr wr = {
		.sg_list = &sge, .num_sge = 1, .opcode = opcode,
		.wr.rdma = { .remote_addr = remote, .rkey = rkey },
	}, *bad;
	time_t end = time(NULL) + 60;
	struct ibv_wc wc;

	CHECK(!ibv_post_send(from->qp, &wr, &bad));
	while (ibv_poll_cq(from->cq, 1, &wc) != 1)
		CHECK(time(NULL) < end);
	return wc;
}

static struct ibv_wc write_all(struct side *from, struct side *to, uint32_t rkey)
{
	return transfer(from, IBV_WR_RDMA_WRITE, (uintptr_t)from->memory, from->mr->lkey,
			(uintptr_t)to->memory, rkey, SIZE);
}

/* Each device knows its own keys only. */
static void keys(void)
{
	struct side *a = open_side(0), *b = open_side(1);
	struct ibv_mr *more = ibv_reg_mr(a->pd, b->memory, SIZE, RIGHTS);

	/* A key that b does not have, for memory of b. */
	CHECK(more && more->rkey >> 8 != b->mr->rkey >> 8);
	connect_sides(a, b);
	CHECK(write_all(a, b, b->mr->rkey).status == IBV_WC_SUCCESS);
	struct ibv_wc wc = write_all(a, b, more->rkey);
	CHECK(wc.status == IBV_WC_REM_ACCESS_ERR);
	CHECK(wc.vendor_err == 0x88);
}

/* Reads of `length` bytes into device memory, or else into other memory. */
static void read_small(struct side *it, struct ibv_dm *dm, struct ibv_mr *mr, int length)
{
	char *target = it->memory + 2048, found[64];
	struct ibv_wc wc;

	memset(it->memory, length, 64);
	memset(target, 0, 64);
	wc = transfer(it, IBV_WR_RDMA_READ, dm ? 0 : (uintptr_t)target, mr->lkey,
		      (uintptr_t)it->memory, it->mr->rkey, length);
	CHECK(wc.status == IBV_WC_SUCCESS);
	if (dm)
		CHECK(!ibv_memcpy_from_dm(target = found, dm, 0, sizeof(found)));
	CHECK(!memcmp(target, it->memory, length));
}

/* Completions of 128 bytes can contain what was read. libmlx5 before rdma-core 65 copies that
 * from the wrong place. */
static void results(void)
{
	struct side *it = open_side(0);

	connect_to_itself(it->qp, attributes);
	for (int length = 1; length <= 65; length++)
		read_small(it, NULL, it->mr, length);
}

/* Not if it is for device memory, to which the poller cannot copy it. */
static void device_memory(void)
{
	struct side *it = open_side(0);
	struct ibv_alloc_dm_attr attr = { .length = SIZE };
	struct ibv_dm *dm = ibv_alloc_dm(it->context, &attr);
	struct ibv_mr *mr;

	CHECK(dm && (mr = ibv_reg_dm_mr(it->pd, dm, 0, SIZE, RIGHTS | IBV_ACCESS_ZERO_BASED)));
	connect_to_itself(it->qp, attributes);
	for (int length = 1; length <= 64; length++)
		read_small(it, dm, mr, length);
}

static atomic_int stop, writes;

static void *write_always(void *of)
{
	struct side *it = of;

	while (!stop) {
		CHECK(write_all(it, it, it->mr->rkey).status == IBV_WC_SUCCESS);
		writes++;
	}
	return NULL;
}

/* Children of all kinds do no harm to traffic. */
static void children(void)
{
	struct side *it = open_side(0);
	char *arguments[] = { "true", NULL };
	pthread_t thread;
	int status;
	pid_t pid;

	connect_to_itself(it->qp, attributes);
	CHECK(!pthread_create(&thread, NULL, write_always, it));
	for (int n = 0; n < 10; n++) {
		int before = writes;

		CHECK(!system("true"));
		FILE *pipe = popen("echo text", "r");
		CHECK(pipe && fgetc(pipe) == 't' && !pclose(pipe));
		CHECK(!posix_spawnp(&pid, "true", NULL, NULL, arguments, environ));
		CHECK(waitpid(pid, &status, 0) == pid && !status);
		if (!(pid = vfork()))
			execlp("true", "true", NULL), _exit(1);
		CHECK(waitpid(pid, &status, 0) == pid && !status);
		if (!(pid = fork()))
			_exit(0);
		CHECK(waitpid(pid, &status, 0) == pid && !status);
		for (time_t end = time(NULL) + 60; writes == before;)
			CHECK(time(NULL) < end);
	}
	stop = 1;
	CHECK(!pthread_join(thread, NULL));
}

static struct rdma_cm_event *next_event(struct rdma_event_channel *channel, int expected)
{
	struct rdma_cm_event *event;

	CHECK(!rdma_get_cm_event(channel, &event));
	CHECK((int)event->event == expected);
	return event;
}

static void add_queues(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = { .cap = { 1, 1, 1, 1 }, .qp_type = IBV_QPT_RC };

	CHECK(!rdma_create_qp(id, NULL, &init));
}

/* Connects with a depth; returns what the server is told. */
static int server_sees(int depth, struct rdma_cm_id *listener, struct rdma_event_channel *channel)
{
	struct rdma_event_channel *own = rdma_create_event_channel();
	struct rdma_conn_param param = { .initiator_depth = depth, .responder_resources = 3 };
	struct rdma_cm_id *id;
	struct rdma_cm_event *event;
	int seen;

	CHECK(own && !rdma_create_id(own, &id, NULL, RDMA_PS_TCP));
	CHECK(!rdma_resolve_addr(id, NULL, rdma_get_local_addr(listener), 2000));
	rdma_ack_cm_event(next_event(own, RDMA_CM_EVENT_ADDR_RESOLVED));
	CHECK(!rdma_resolve_route(id, 2000));
	rdma_ack_cm_event(next_event(own, RDMA_CM_EVENT_ROUTE_RESOLVED));
	add_queues(id);
	if (rdma_connect(id, &param)) {
		CHECK(errno == EINVAL);
		return -1;
	}
	event = next_event(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(event->param.conn.initiator_depth == 3);
	seen = event->param.conn.responder_resources;
	add_queues(event->id);
	struct rdma_conn_param answer = { .initiator_depth = 2, .responder_resources = 5 };
	CHECK(!rdma_accept(event->id, &answer));
	rdma_ack_cm_event(event);
	event = next_event(own, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(event->param.conn.initiator_depth == 5);
	CHECK(event->param.conn.responder_resources == 2);
	rdma_ack_cm_event(event);
	rdma_ack_cm_event(next_event(channel, RDMA_CM_EVENT_ESTABLISHED));
	return seen;
}

/* 255 stands for the device's maximum, more than that is refused, and each side is told the
 * other's depths. */
static void depths(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct sockaddr_in address = {
		.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};
	struct rdma_cm_id *listener;
	struct ibv_device_attr device;

	CHECK(channel && !rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&address));
	CHECK(!rdma_listen(listener, 4));
	CHECK(!ibv_query_device(listener->verbs, &device));
	CHECK(server_sees(4, listener, channel) == 4);
	CHECK(server_sees(255, listener, channel) == device.max_qp_init_rd_atom);
	CHECK(server_sees(device.max_qp_init_rd_atom + 1, listener, channel) == -1);
}

int main(int argc, char **argv)
{
	const struct { const char *name; void (*run)(void); } all[] = {
		{ "keys", keys }, { "results", results },
		{ "device-memory", device_memory }, { "children", children },
		{ "depths", depths },
	};

	CHECK(argc == 2);
	for (unsigned n = 0; n < sizeof(all) / sizeof(*all); n++) {
		if (!strcmp(all[n].name, argv[1])) {
			all[n].run();
			puts("well");
			fflush(stdout);
			_exit(0);
		}
	}
	return 2;
}
