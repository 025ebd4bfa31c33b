"""The XLA path on the table of cases."""

from tests.paged_attention_body import PagedAttentionTests


class TestPagedXla(PagedAttentionTests):
    """Runs on the CPU and refuses nothing."""

    implementation = "xla"
