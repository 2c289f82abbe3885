/*
 * A server that listens, and whose children connect to it by ids of their own: the connection
 * manager's library keeps the contexts that the parent has opened. Its own ids are the parent's.
 */
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "check.h"

enum { CHILDREN = 3 };

static struct ibv_qp_init_attr attributes(void)
{
	return (struct ibv_qp_init_attr){
		.cap = { 4, 4, 1, 1 }, .qp_type = IBV_QPT_RC, .sq_sig_all = 1 };
}

static struct rdma_addrinfo *resolve(const char *address, int flags)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = flags }, *found;

	CHECK(!rdma_getaddrinfo(address, "7471", &hints, &found));
	return found;
}

static int used[2];

static void client(const char *address, struct rdma_cm_id *listening)
{
	struct rdma_addrinfo *found = resolve(address, 0);
	struct ibv_qp_init_attr init = attributes();
	static char message[16], answer[16];
	struct rdma_cm_id *id;
	struct ibv_mr *mr, *answers;
	struct ibv_wc wc;
	char byte;

	CHECK(read(used[0], &byte, 1) == 1 && rdma_listen(listening, 1) && errno == EIO);
	CHECK(!rdma_create_ep(&id, found, NULL, &init));
	CHECK((mr = rdma_reg_msgs(id, message, sizeof message)));
	CHECK((answers = rdma_reg_msgs(id, answer, sizeof answer)));
	CHECK(!rdma_post_recv(id, NULL, answer, sizeof answer, answers));
	CHECK(!rdma_connect(id, NULL));
	sprintf(message, "%d", getpid());
	CHECK(!rdma_post_send(id, NULL, message, sizeof message, mr, 0));
	CHECK(rdma_get_send_comp(id, &wc) == 1 && !wc.status);
	CHECK(rdma_get_recv_comp(id, &wc) == 1 && !wc.status);
	CHECK(!strcmp(message, answer));
	CHECK(!rdma_disconnect(id) && !rdma_dereg_mr(mr) && !rdma_dereg_mr(answers));
	rdma_destroy_ep(id);
}

int main(int argc, char **argv)
{
	struct rdma_addrinfo *found = resolve(argv[1], RAI_PASSIVE);
	struct ibv_qp_init_attr init = attributes();
	struct rdma_cm_id *listening, *id;
	char message[16] = { 0 };
	struct ibv_mr *mr;
	struct ibv_wc wc;
	int status;

	CHECK(argc == 2 && !pipe(used) && !rdma_create_ep(&listening, found, NULL, &init));
	CHECK(!rdma_listen(listening, 8));
	for (int n = 0; n < CHILDREN; n++)
		if (!fork()) {
			client(argv[1], listening);
			_exit(0);
		}
	/* The first to use it. */
	CHECK(!rdma_set_option(listening, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, message, 1));
	CHECK(write(used[1], "uuu", CHILDREN) == CHILDREN);
	for (int n = 0; n < CHILDREN; n++) {
		CHECK(!rdma_get_request(listening, &id));
		CHECK((mr = rdma_reg_msgs(id, message, sizeof message)));
		CHECK(!rdma_post_recv(id, NULL, message, sizeof message, mr));
		CHECK(!rdma_accept(id, NULL));
		CHECK(rdma_get_recv_comp(id, &wc) == 1 && !wc.status);
		CHECK(!rdma_post_send(id, NULL, message, sizeof message, mr, 0));
		CHECK(rdma_get_send_comp(id, &wc) == 1 && !wc.status);
		CHECK(!rdma_dereg_mr(mr));
		rdma_disconnect(id);
		rdma_destroy_ep(id);
	}
	for (int n = 0; n < CHILDREN; n++)
		CHECK(wait(&status) > 0 && !status);
	rdma_destroy_ep(listening);
	return 0;
}
