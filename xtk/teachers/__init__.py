"""Floor 4: who scores documents. One file a backend, one line in the table."""

BACKENDS = {
    "transformers": "xtk.teachers.transformers:TransformersTeacher",
    "vllm": "xtk.teachers.vllm:VllmTeacher",
    "server": "xtk.teachers.vllm_server_client:ServerTeacher",
}
