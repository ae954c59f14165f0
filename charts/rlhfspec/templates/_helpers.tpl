{{- /* The release's own name for its parts: RELEASE-nats, or RELEASE-rlhfspec-nats. */}}
{{- define "rlhfspec.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "rlhfspec.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* Of the pods of one component: (list . "nats"). */}}
{{- define "rlhfspec.selector" -}}
app.kubernetes.io/name: {{ (index . 0).Chart.Name }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- /* (list . "slim") */}}
{{- define "rlhfspec.image" -}}
{{- $image := index (index . 0).Values.images (index . 1) -}}
{{ $image.repository }}:{{ $image.tag | default (index . 0).Chart.AppVersion }}
{{- end }}

{{- /* As a list without duplicates; sorted, so that renderings are the same. */}}
{{- define "rlhfspec.jobNamespaces" -}}
{{ .Values.operator.jobNamespaces | default (list .Release.Namespace) | uniq | sortAlpha | toJson }}
{{- end }}

{{- define "rlhfspec.claim" -}}
{{- if .Values.storage.claim }}{{ .Values.storage.claim }}
{{- else if .Values.storage.create.enabled }}{{ include "rlhfspec.fullname" . }}-storage{{ end }}
{{- end }}

{{- define "rlhfspec.natsUrl" -}}
{{- if .Values.nats.enabled -}}
tls://{{ include "rlhfspec.fullname" . }}-nats.{{ .Release.Namespace }}.svc:{{ (.Files.Get "files/names.yaml" | fromYaml).natsPort }}
{{- else -}}
{{ required "nats.external.url: needed when nats.enabled is false" .Values.nats.external.url }}
{{- end }}
{{- end }}

{{- define "rlhfspec.redisUrl" -}}
{{- if .Values.redis.enabled -}}
rediss://{{ include "rlhfspec.fullname" . }}-redis.{{ .Release.Namespace }}.svc:{{ (.Files.Get "files/names.yaml" | fromYaml).redisPort }}
{{- else -}}
{{ required "redis.external.url: needed when redis.enabled is false" .Values.redis.external.url }}
{{- end }}
{{- end }}

{{- define "rlhfspec.pullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* Pod security `restricted`. */}}
{{- define "rlhfspec.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "rlhfspec.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* Apart from the component's other replicas, where that can be: (list . "operator"). */}}
{{- define "rlhfspec.apart" -}}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- include "rlhfspec.selector" . | nindent 14 }}
{{- with (index . 0).Values.topologySpread }}
{{- if .enabled }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ .topologyKey }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "rlhfspec.selector" $ | nindent 8 }}
{{- end }}
{{- end }}
{{- end }}

{{- /* At most one pod of the component is evicted at a time; of a single one that hinders no `kubectl drain`. */}}
{{- define "rlhfspec.budget" -}}
{{- if (index . 0).Values.podDisruptionBudgets.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "rlhfspec.fullname" (index . 0) }}-{{ index . 1 }}
  labels: {{- include "rlhfspec.labels" (index . 0) | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "rlhfspec.selector" . | nindent 6 }}
{{- end }}
{{- end }}
