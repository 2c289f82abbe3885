/*
 * `exits serve ADDRESS` accepts a connection from another host, `exits connect ADDRESS` makes
 * it. Both end it without a look at what the other answers, and exit at once.
 */
#include <arpa/inet.h>
#include <rdma/rdma_cma.h>
#include <stdlib.h>

#include "check.h"

enum { PATIENCE = 60000 };

int main(int argc, char **argv)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(7471) };
	struct ibv_qp_init_attr queues = { .cap = { 4, 4, 1, 1 }, .qp_type = IBV_QPT_RC };
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };
	struct rdma_cm_id *listener, *id;

	CHECK(argc == 3 && inet_pton(AF_INET, argv[2], &at.sin_addr) == 1);
	if (!strcmp(argv[1], "serve")) {
		CHECK(!rdma_create_id(NULL, &listener, NULL, RDMA_PS_TCP));
		CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&at));
		CHECK(!rdma_listen(listener, 1));
		puts("listens");
		fflush(stdout);
		CHECK(!rdma_get_request(listener, &id));
		CHECK(!rdma_create_qp(id, NULL, &queues) && !rdma_accept(id, &param));
	} else {
		CHECK(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP));
		CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&at, PATIENCE));
		CHECK(!rdma_resolve_route(id, PATIENCE));
		CHECK(!rdma_create_qp(id, NULL, &queues) && !rdma_connect(id, &param));
	}
	rdma_disconnect(id);
	rdma_destroy_qp(id);
	CHECK(!rdma_destroy_id(id));
	exit(0);
}
