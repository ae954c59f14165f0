{{- /* What the operator is told; it reads nothing else of the release. */}}
{{- define "rlhfspec.operatorSettings" -}}
{{- $full := include "rlhfspec.fullname" . }}
{{- $names := .Files.Get "files/names.yaml" | fromYaml }}
namespace: {{ .Release.Namespace }}
release: {{ $full }}
scope: {{ eq .Values.operator.scope "cluster" | ternary "cluster" "namespaced" }}
job_namespaces: {{ include "rlhfspec.jobNamespaces" . }}
{{- if eq .Values.operator.scope "cluster" }}
namespace_label: {{ .Values.operator.namespaceLabel | quote }}
namespace_kit: {{ include "rlhfspec.namespaceKit" . }}
{{- end }}
images:
  {{- range $kind := list "slim" "cpu" "cuda" }}
  {{ $kind }}: {{ include "rlhfspec.image" (list $ $kind) }}
  {{- end }}
image_pull_policy: {{ .Values.images.pullPolicy }}
image_pull_secrets: {{ toJson .Values.images.pullSecrets }}
network_policies: {{ .Values.networkPolicy.enabled }}
kueue: {{ has "kueue" .Values.operator.gang }}
claim: {{ include "rlhfspec.claim" . | quote }}
{{- with .Values.jobs }}
resources: {{ toJson .resources }}
shared_memory: {{ .sharedMemory }}
gpu_resources: {{ toJson .gpuResources }}
pod_template: {{ toJson .podTemplate }}
{{- $classes := $.Values.priorityClasses.enabled | ternary (dict "trainer" (printf "%s-trainer" $full) "generator" (printf "%s-generator" $full)) dict }}
{{- range $role, $class := .priorityClasses }}
{{- if $class }}{{ $_ := set $classes $role $class }}{{ end }}
{{- end }}
priority_classes: {{ toJson $classes }}
otlp_endpoint: {{ .otlpEndpoint | quote }}
coscheduler: {{ .coscheduler | quote }}
max_workers: {{ int .maxWorkers }}
{{- with .gateway.ingress }}
{{- if .enabled }}
{{- if not .host }}{{ fail "jobs.gateway.ingress.host: needed when jobs.gateway.ingress.enabled is true" }}{{ end }}
{{- if and $.Values.networkPolicy.enabled (not $.Values.jobs.gateway.ingressFrom) }}
{{- fail "jobs.gateway.ingressFrom: name your ingress controller's pods, which the NetworkPolicy otherwise blocks" }}
{{- end }}
gateway_ingress: {{ dict "host" .host "class_name" .className "annotations" .annotations "tls_secret" .tlsSecret | toJson }}
{{- end }}
{{- end }}
allowed:
  fields: {{ toJson .allowed.fields }}
  code_fields: {{ toJson .allowed.codeFields }}
  code_roles: {{ toJson .allowed.codeRoles }}
  label: {{ .allowed.label | quote }}
{{- end }}
nats_url: {{ include "rlhfspec.natsUrl" . }}
redis_url: {{ include "rlhfspec.redisUrl" . }}
chooses_user: {{ not (include "rlhfspec.isOpenshift" .) }}
report_url: https://{{ $full }}-operator.{{ .Release.Namespace }}.svc:{{ $names.reportPort }}
{{- end }}

{{- /* Keys of the release; of an external NATS and Redis, what their Secrets say in their stead. */}}
{{- define "rlhfspec.operatorKeys" -}}
projected:
  defaultMode: 0440
  sources:
    - secret: {name: {{ include "rlhfspec.fullname" . }}-keys}
    {{- if not .Values.nats.enabled }}
    - secret:
        name: {{ .Values.nats.external.existingSecret }}
        items: [{key: account.seed, path: nats.account.seed}, {key: ca.pem, path: nats.ca.pem}]
    {{- end }}
    {{- if not .Values.redis.enabled }}
    - secret:
        name: {{ .Values.redis.external.existingSecret }}
        items:
          - {key: ca.pem, path: redis.ca.pem}
          - {key: username, path: redis.username}
          - {key: password, path: redis.password}
    {{- end }}
{{- end }}
