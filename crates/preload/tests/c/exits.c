/*
 * `exits serve ADDRESS [PORT [COUNT]]` accepts connections from another host, `exits connect
 * ADDRESS [PORT]` makes one. Both end them without a look at what the other answers, and exit
 * at once; with "hold" as the last argument, when they get SIGTERM.
 */
#include <arpa/inet.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <stdlib.h>

#include "check.h"

enum { PATIENCE = 60000, MAX_COUNT = 64 };

static int count = 1;
static struct rdma_cm_id *ids[MAX_COUNT];

static void say(const char *what)
{
	puts(what);
	fflush(stdout);
}

static void end(int signal)
{
	(void)signal;
	for (int i = 0; i < count; i++) {
		rdma_disconnect(ids[i]);
		rdma_destroy_qp(ids[i]);
		CHECK(!rdma_destroy_id(ids[i]));
	}
	exit(0);
}

int main(int argc, char **argv)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(7471) };
	struct ibv_qp_init_attr queues = { .cap = { 4, 4, 1, 1 }, .qp_type = IBV_QPT_RC };
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };
	struct rdma_cm_id *listener;
	int hold = !strcmp(argv[argc - 1], "hold");

	argc -= hold;
	CHECK(argc >= 3 && inet_pton(AF_INET, argv[2], &at.sin_addr) == 1);
	if (argc > 3)
		at.sin_port = htons(atoi(argv[3]));
	if (argc > 4)
		count = atoi(argv[4]);
	CHECK(count <= MAX_COUNT);
	if (!strcmp(argv[1], "serve")) {
		CHECK(!rdma_create_id(NULL, &listener, NULL, RDMA_PS_TCP));
		CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&at));
		CHECK(!rdma_listen(listener, count));
		say("listens");
		for (int i = 0; i < count; i++) {
			CHECK(!rdma_get_request(listener, &ids[i]));
			CHECK(!rdma_create_qp(ids[i], NULL, &queues));
			CHECK(!rdma_accept(ids[i], &param));
		}
	} else {
		CHECK(!rdma_create_id(NULL, &ids[0], NULL, RDMA_PS_TCP));
		CHECK(!rdma_resolve_addr(ids[0], NULL, (struct sockaddr *)&at, PATIENCE));
		CHECK(!rdma_resolve_route(ids[0], PATIENCE));
		CHECK(!rdma_create_qp(ids[0], NULL, &queues));
		CHECK(!rdma_connect(ids[0], &param));
	}
	if (!hold)
		end(0);
	/* As programs do, in the handler: this thread is in no call then. */
	signal(SIGTERM, end);
	say("connected");
	for (;;)
		pause();
}
