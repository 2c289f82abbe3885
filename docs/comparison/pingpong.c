/* 1000 round trips of 64 bytes between two queue pairs of a process. */
#include <assert.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(call) do { if (!(call)) { perror(#call); exit(1); } } while (0)

static void exchange(struct ibv_qp *from, struct ibv_qp *to, struct ibv_cq *cq,
                     struct ibv_mr *message, struct ibv_mr *place)
{
    struct ibv_sge in = {(uintptr_t)place->addr, 64, place->lkey};
    struct ibv_sge out = {(uintptr_t)message->addr, 64, message->lkey};
    struct ibv_recv_wr recv = {.wr_id = 1, .sg_list = &in, .num_sge = 1}, *bad_recv;
    struct ibv_send_wr send = {.sg_list = &out, .num_sge = 1, .opcode = IBV_WR_SEND,
                               .send_flags = IBV_SEND_SIGNALED}, *bad_send;
    CHECK(!ibv_post_recv(to, &recv, &bad_recv));
    CHECK(!ibv_post_send(from, &send, &bad_send));
    struct ibv_wc wc[2];
    for (int count = 0; count < 2;) {
        int polled = ibv_poll_cq(cq, 2, wc);
        CHECK(polled >= 0);
        for (int i = 0; i < polled; i++)
            assert(wc[i].status == IBV_WC_SUCCESS);
        count += polled;
    }
}

static void join(struct ibv_qp *qp, uint32_t peer, union ibv_gid gid)
{
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1,
                               .qp_access_flags = IBV_ACCESS_LOCAL_WRITE};
    struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024,
                              .dest_qp_num = peer, .max_dest_rd_atomic = 1,
                              .min_rnr_timer = 12,
                              .ah_attr = {.is_global = 1, .port_num = 1,
                                          .grh = {.dgid = gid, .sgid_index = 1,
                                                  .hop_limit = 64}}};
    struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7,
                              .rnr_retry = 7, .max_rd_atomic = 1};
    CHECK(!ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                                        IBV_QP_ACCESS_FLAGS));
    CHECK(!ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
                                       IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    CHECK(!ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                                       IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                       IBV_QP_MAX_QP_RD_ATOMIC));
}

int main(void)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);
    CHECK(devices && devices[0]);
    struct ibv_context *context = ibv_open_device(devices[0]);
    CHECK(context);
    struct ibv_pd *pd = ibv_alloc_pd(context);
    struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
    CHECK(pd && cq);
    struct ibv_qp_init_attr attr = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
                                    .cap = {4, 4, 1, 1}};
    struct ibv_qp *a = ibv_create_qp(pd, &attr), *b = ibv_create_qp(pd, &attr);
    CHECK(a && b);
    union ibv_gid gid;
    CHECK(!ibv_query_gid(context, 1, 1, &gid));
    join(a, b->qp_num, gid);
    join(b, a->qp_num, gid);
    char first[64], second[64];
    memset(first, 7, sizeof(first));
    struct ibv_mr *message = ibv_reg_mr(pd, first, 64, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_mr *place = ibv_reg_mr(pd, second, 64, IBV_ACCESS_LOCAL_WRITE);
    CHECK(message && place);
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < 1000; i++) {
        exchange(a, b, cq, message, place);
        exchange(b, a, cq, place, message);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    for (int i = 0; i < 64; i++)
        assert(first[i] == 7);
    printf("%.2fus a round trip\n",
           (end.tv_sec - start.tv_sec) * 1e3 + (end.tv_nsec - start.tv_nsec) * 1e-6);
    ibv_destroy_qp(a), ibv_destroy_qp(b), ibv_dereg_mr(message), ibv_dereg_mr(place);
    ibv_destroy_cq(cq), ibv_dealloc_pd(pd), ibv_close_device(context);
    ibv_free_device_list(devices);
    return 0;
}
