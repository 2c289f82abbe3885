/*
 * Two processes of which one writes to the other: `serve OWN PEER TIMEOUT` and `write OWN PEER
 * TIMEOUT`, with files by which they exchange addresses. The writer allows one retry, and says
 * each tenth of a second that its writes succeed, until one fails.
 */
#include <infiniband/verbs.h>
#include <stdlib.h>
#include <time.h>

#include "check.h"

struct address {
	union ibv_gid gid;
	uint32_t lid, qpn, rkey;
	uint64_t memory;
};

static void put(const char *name, const struct address *own)
{
	char temporary[256];
	FILE *file;

	snprintf(temporary, sizeof temporary, "%s.new", name);
	file = fopen(temporary, "w");
	CHECK(file && fwrite(own, sizeof *own, 1, file) == 1 && !fclose(file));
	CHECK(!rename(temporary, name));
}

static void get(const char *name, struct address *peer)
{
	FILE *file;

	while (!(file = fopen(name, "r")))
		usleep(1000);
	CHECK(fread(peer, sizeof *peer, 1, file) == 1 && !fclose(file));
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_context *context;
	static char memory[65536];
	struct ibv_gid_entry gids[128];
	struct ibv_port_attr port;
	struct address own, peer;
	struct ibv_qp *qp;
	struct ibv_cq *cq;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	double last = 0;
	ssize_t found;

	CHECK(argc == 5 && devices && *devices);
	context = ibv_open_device(*devices);
	CHECK(context && (pd = ibv_alloc_pd(context)));
	CHECK((cq = ibv_create_cq(context, 16, NULL, NULL, 0)));
	mr = ibv_reg_mr(pd, memory, sizeof memory,
			IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	qp = ibv_create_qp(pd, &(struct ibv_qp_init_attr){
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 8, 8, 1, 1 } });
	CHECK(mr && qp && !ibv_query_port(context, 1, &port));
	found = ibv_query_gid_table(context, gids, 128, 0);
	CHECK(found > 0);
	/* The last one is RoCE v2. */
	own = (struct address){ gids[found - 1].gid, port.lid, qp->qp_num, mr->rkey,
				(uintptr_t)memory };
	put(argv[2], &own);
	get(argv[3], &peer);
	struct ibv_qp_attr at = {
		.qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
	};
	CHECK(!ibv_modify_qp(qp, &at, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			     IBV_QP_ACCESS_FLAGS));
	at = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer.qpn,
		.max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .dlid = peer.lid,
			     .grh = { .dgid = peer.gid, .hop_limit = 1,
				      .sgid_index = gids[found - 1].gid_index } },
	};
	CHECK(!ibv_modify_qp(qp, &at, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
			     IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			     IBV_QP_MIN_RNR_TIMER));
	at = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = atoi(argv[4]), .retry_cnt = 1,
				   .rnr_retry = 7, .max_rd_atomic = 1 };
	CHECK(!ibv_modify_qp(qp, &at, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			     IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
	printf("ready\n");
	fflush(stdout);
	while (argv[1][0] == 's')
		pause();
	/* The server is ready some time. */
	sleep(1);
	for (;;) {
		struct ibv_sge sge = { (uintptr_t)memory, sizeof memory, mr->lkey };
		struct ibv_send_wr *bad, wr = {
			.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
			.send_flags = IBV_SEND_SIGNALED,
			.wr.rdma = { peer.memory, peer.rkey },
		};
		struct ibv_wc wc;
		int got;

		CHECK(!ibv_post_send(qp, &wr, &bad));
		while (!(got = ibv_poll_cq(cq, 1, &wc)))
			;
		CHECK(got == 1);
		if (wc.status) {
			printf("status %d\n", wc.status);
			return 0;
		}
		if (now() - last > 0.1) {
			printf("writes\n");
			fflush(stdout);
			last = now();
		}
		usleep(1000);
	}
}
