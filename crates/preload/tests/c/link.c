/*
 * Prints the state of the port, and again with each asynchronous event: its name, state and
 * physical state of ibv_query_port and of sysfs, the number of GIDs and the interface of the
 * first. For each line of standard input, writes to itself over a reliable connection, and
 * prints the status.
 */
#include <dirent.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdlib.h>

#include "check.h"

static struct ibv_context *context;

/* Reads an attribute of the port. */
static void attribute(const char *name, char *to, size_t size)
{
	char path[256];
	ssize_t length;
	int fd;

	snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/1/%s",
		 ibv_get_device_name(context->device), name);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	CHECK(fd >= 0);
	length = read(fd, to, size - 1);
	to[length > 0 ? length - 1 : 0] = 0;
	CHECK(!close(fd));
}

static void show(const char *what)
{
	char state[32], physical[32], interface[32] = "none";
	struct ibv_gid_entry entries[128];
	struct ibv_port_attr port;
	ssize_t gids = ibv_query_gid_table(context, entries, 128, 0);
	char name[32];

	CHECK(gids >= 0 && !ibv_query_port(context, 1, &port));
	attribute("state", state, sizeof state);
	attribute("phys_state", physical, sizeof physical);
	if (gids) {
		snprintf(name, sizeof name, "gid_attrs/ndevs/%u", entries[0].gid_index);
		attribute(name, interface, sizeof interface);
	}
	printf("%s: %d %d, %s, %s, %zd GIDs, %s\n", what, port.state, port.phys_state, state,
	       physical, gids, interface);
	fflush(stdout);
}

/* The interfaces in the device's directory. */
static void show_interfaces(void)
{
	char path[128];
	struct dirent *entry;
	DIR *directory;

	snprintf(path, sizeof path, "/sys/class/infiniband/%s/device/net",
		 ibv_get_device_name(context->device));
	CHECK((directory = opendir(path)));
	printf("device/net:");
	while ((entry = readdir(directory)))
		if (entry->d_name[0] != '.')
			printf(" %s", entry->d_name);
	puts("");
	fflush(stdout);
	CHECK(!closedir(directory));
}

static void *events(void *ignored)
{
	struct ibv_async_event event;
	int errors = 0;

	while (!ibv_get_async_event(context, &event)) {
		enum ibv_event_type type = event.event_type;

		ibv_ack_async_event(&event);
		if (type == IBV_EVENT_PORT_ERR) {
			char downed[32];

			attribute("counters/link_downed", downed, sizeof downed);
			CHECK(atoi(downed) >= ++errors);
		}
		show(type == IBV_EVENT_PORT_ERR ? "PORT_ERR" :
		     type == IBV_EVENT_PORT_ACTIVE ? "PORT_ACTIVE" :
		     type == IBV_EVENT_GID_CHANGE ? "GID_CHANGE" : ibv_event_type_str(type));
	}
	return NULL;
}

int main(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	static char memory[8192], line[32];
	struct ibv_gid_entry gids[128];
	struct ibv_port_attr port;
	struct ibv_qp *qp;
	struct ibv_cq *cq;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	pthread_t thread;

	CHECK(devices && *devices);
	context = ibv_open_device(*devices);
	CHECK(context);
	show("start");
	CHECK(!pthread_create(&thread, NULL, events, NULL));
	CHECK((pd = ibv_alloc_pd(context)));
	CHECK((cq = ibv_create_cq(context, 16, NULL, NULL, 0)));
	mr = ibv_reg_mr(pd, memory, sizeof memory,
			IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	qp = ibv_create_qp(pd, &(struct ibv_qp_init_attr){
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 8, 8, 1, 1 } });
	CHECK(!ibv_query_port(context, 1, &port));
	CHECK(mr && qp && ibv_query_gid_table(context, gids, 128, 0) > 0);
	struct ibv_qp_attr at = {
		.qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
	};
	CHECK(!ibv_modify_qp(qp, &at, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			     IBV_QP_ACCESS_FLAGS));
	at = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qp->qp_num,
		.max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .dlid = port.lid,
			     .grh = { .dgid = gids[0].gid, .sgid_index = gids[0].gid_index,
				      .hop_limit = 1 } },
	};
	CHECK(!ibv_modify_qp(qp, &at, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
			     IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			     IBV_QP_MIN_RNR_TIMER));
	at = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 15, .retry_cnt = 7,
				   .rnr_retry = 7, .max_rd_atomic = 1 };
	CHECK(!ibv_modify_qp(qp, &at, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			     IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
	while (fgets(line, sizeof line, stdin)) {
		struct ibv_sge sge = { (uintptr_t)memory, 4096, mr->lkey };
		struct ibv_send_wr *bad, wr = {
			.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
			.send_flags = IBV_SEND_SIGNALED,
			.wr.rdma = { (uintptr_t)memory + 4096, mr->rkey },
		};
		if (line[0] == 'n') {
			show_interfaces();
			continue;
		}
		struct ibv_wc wc;
		int got;

		CHECK(!ibv_post_send(qp, &wr, &bad));
		while (!(got = ibv_poll_cq(cq, 1, &wc)))
			;
		CHECK(got == 1);
		printf("write %d\n", wc.status);
		fflush(stdout);
	}
	return 0;
}
