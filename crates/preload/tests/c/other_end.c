/*
 * One end of a connection on which the client makes a mistake, the second argument; the first is
 * "server" or "client". Each end writes its address as a line and reads that of the other one.
 * The server then waits until its input ends.
 */
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <stdint.h>
#include <string.h>

#include "check.h"

struct end {
	uint32_t qpn, rkey;
	uint64_t address;
	unsigned lid;
	union ibv_gid gid;
};

static char memory[4096] __attribute__((aligned(4096)));

static void write_end(const struct end *own)
{
	printf("%" PRIu32 " %" PRIu32 " %" PRIu64 " %u ", own->qpn, own->rkey, own->address,
	       own->lid);
	for (int n = 0; n < 16; n++)
		printf("%02x", own->gid.raw[n]);
	puts("");
	fflush(stdout);
}

static void read_end(struct end *other)
{
	CHECK(scanf("%" SCNu32 " %" SCNu32 " %" SCNu64 " %u ", &other->qpn, &other->rkey,
		    &other->address, &other->lid) == 4);
	for (int n = 0; n < 16; n++)
		CHECK(scanf("%2hhx", &other->gid.raw[n]) == 1);
}

static void connect_to(struct ibv_qp *qp, const struct end *peer, const char *mistake)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = peer->qpn,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = 1,
		.ah_attr = { .dlid = peer->lid, .port_num = 1, .is_global = 1 },
	};

	attr.ah_attr.grh.dgid = peer->gid;
	attr.ah_attr.grh.hop_limit = 64;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
						IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
						IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr.qp_state = IBV_QPS_RTS;
	/* 134 ms, or 1 ms for a peer that does not answer. */
	attr.timeout = strcmp(mistake, "init") ? 15 : 8;
	attr.retry_cnt = 1;
	attr.rnr_retry = 1;
	attr.max_rd_atomic = 1;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
						IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
						IBV_QP_MAX_QP_RD_ATOMIC));
}

int main(int count, char **arguments)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_qp_attr init = {
		.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
	};
	struct ibv_qp_init_attr ask = {
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_send_wr send = { .wr_id = 0x5e, .opcode = IBV_WR_RDMA_WRITE,
				    .send_flags = IBV_SEND_SIGNALED, .num_sge = 1 }, *bad;
	struct ibv_context *context;
	struct end own = { 0 }, peer;
	struct ibv_port_attr port;
	struct ibv_wc wc = { 0 };
	const char *mistake;
	struct ibv_sge list;
	struct ibv_mr *mr;
	struct ibv_qp *qp;
	struct ibv_pd *pd;
	int serves;

	CHECK(count == 3 && devices && devices[0]);
	serves = !strcmp(arguments[1], "server");
	mistake = arguments[2];
	context = ibv_open_device(devices[0]);
	CHECK(context);
	pd = ibv_alloc_pd(context);
	ask.send_cq = ask.recv_cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	CHECK(pd && ask.send_cq && !ibv_query_port(context, 1, &port));
	mr = ibv_reg_mr(pd, memory, sizeof(memory),
			IBV_ACCESS_LOCAL_WRITE |
				(!strcmp(mistake, "right") ? 0 : IBV_ACCESS_REMOTE_WRITE));
	qp = ibv_create_qp(pd, &ask);
	CHECK(mr && qp);
	CHECK(!ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
						IBV_QP_ACCESS_FLAGS));
	CHECK(!ibv_query_gid(context, 1, 0, &own.gid));
	own.qpn = qp->qp_num;
	own.rkey = mr->rkey;
	own.address = (uintptr_t)memory;
	own.lid = port.lid;
	write_end(&own);
	read_end(&peer);
	if (!serves || strcmp(mistake, "init"))
		connect_to(qp, &peer, mistake);
	if (serves) {
		puts("ready");
		fflush(stdout);
		while (getchar() != EOF)
			;
		return 0;
	}
	list = (struct ibv_sge){ (uintptr_t)memory, 64, mr->lkey };
	send.sg_list = &list;
	send.wr.rdma.remote_addr = peer.address;
	send.wr.rdma.rkey = peer.rkey;
	if (!strcmp(mistake, "key"))
		send.wr.rdma.rkey += 0x100000;
	else if (!strcmp(mistake, "no-receive"))
		send.opcode = IBV_WR_SEND;
	else
		CHECK(!strcmp(mistake, "right") || !strcmp(mistake, "init"));
	/* The server is ready. */
	CHECK(getchar() != EOF);
	while (getchar() != 'r')
		;
	CHECK(!ibv_post_send(qp, &send, &bad));
	while (!ibv_poll_cq(ask.send_cq, 1, &wc))
		;
	CHECK(wc.status != IBV_WC_SUCCESS);
	return 0;
}
