"""Teachers that score documents, and the list of their backends."""

BACKENDS = {
    "transformers": "xtk.teachers.transformers:TransformersTeacher",
    "vllm": "xtk.teachers.vllm:VllmTeacher",
    "server": "xtk.teachers.vllm_server_client:ServerTeacher",
}
